"""Over a mesh: rows in a ``shard_map``, and parameters sharded under plain ``jit``."""

import os
import subprocess
import sys


def test_several_devices():
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.functional.devices"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["rows", "parameters"]
