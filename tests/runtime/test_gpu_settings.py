"""XLA's settings for serving: applied once, never against the user, and known to this jaxlib."""

import os
import subprocess
import sys

from lmjax.runtime import gpu_settings


def test_what_is_set_already_stays():
    environ = {
        "NCCL_DEBUG": "INFO",
        "LLVM_DISABLE_SYMBOLIZATION": "0",
        "XLA_FLAGS": "--xla_gpu_nccl_termination_timeout_seconds=5 --xla_foo",
    }
    applied = gpu_settings.apply(0.8, environ)
    assert environ["NCCL_DEBUG"] == "INFO" and environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.8"
    assert environ["XLA_FLAGS"] == (
        "--xla_gpu_nccl_termination_timeout_seconds=5 --xla_foo "
        "--xla_gpu_first_collective_call_terminate_timeout_seconds=600"
    )
    assert {setting.name for setting in applied} == {
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "xla_gpu_first_collective_call_terminate_timeout_seconds",
    }
    assert gpu_settings.apply(0.8, environ) == []


def test_the_off_switch():
    environ = {gpu_settings.SWITCH: "off"}
    assert gpu_settings.apply(0.9, environ) == [] and environ == {gpu_settings.SWITCH: "off"}


def test_this_jaxlib_knows_the_flags():
    """An unknown flag would end the process at start."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environ.pop("XLA_FLAGS", None)
    gpu_settings.apply(0.9, environ)
    code = "import jax; jax.jit(lambda x: x + 1)(1.0); print('fine')"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr[-500:]
    environ["XLA_FLAGS"] += " --xla_gpu_no_such_flag=1"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0, "the test could not fail"
