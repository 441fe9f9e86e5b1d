"""What a tick of a pipeline costs a device: its share of the whole forward, and little more."""

import os
import re
import subprocess
import sys


def test_a_tick_is_a_share_of_the_forward():
    """XLA's count of operations and bytes; 15 layers do not divide into 4 stages, which costs 16 / 15."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.tick_costs", "4:2:2", "15:4:1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    ratios = [float(x) for x in re.findall(r"(?:flops|bytes) ([\d.]+)", done.stdout)]
    assert len(ratios) == 4
    assert all(0.5 < ratio <= 1.15 for ratio in ratios), done.stdout
