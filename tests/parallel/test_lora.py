"""Adapters on several devices give what merged weights give."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(900)
@pytest.mark.parametrize("degree", ["4", pytest.param("2", marks=pytest.mark.slow)])
def test_answers_are_those_of_merged_weights(degree):
    """In a process of its own. With 4 devices each KV head lies on two."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.sharded_lora", degree]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 1
