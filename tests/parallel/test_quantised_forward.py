"""Packed weights and a KV cache of 1-byte numbers on a mesh."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASES = ["int8:2:float32", "gptq-4-g128-sym:2:int8"]
MORE = [
    *("int4:4:float32", "fp8:4:float32", "awq-g64:4:float32", "fp8-block:2:float32", "gptq-8-all-sym:2:float32"),
    *("ct-w4a16-channel:2:float32", "ct-w4a16-g32-asym:4:float8_e4m3fn"),
    *(
        "phi3/int8:2:float32",
        "falcon_new/int8:2:float32",
        "gptj/int8:2:float32",
    ),  # fused; by KV head; interleaved
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_equals_one_device(cases):
    """Sums in another order move few numbers of a 1-byte KV cache to their neighbours."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.quantised_forward", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {case: float(error) for case, error in (line.split() for line in done.stdout.splitlines())}
    assert set(errors) == set(cases)
    assert all(error < (1e-5 if case.endswith("float32") else 0.02) for case, error in errors.items()), errors


EXPERTS = ["gpt_oss/mxfp4:2:tp+"]
EXPERTS += [
    f"{model}:{tp}:{how}"
    for model in ("mixtral/int4", "gpt_oss/int8", "gpt_oss/int4")
    for tp, how in ((2, "tp"), (4, "ep"))
]
MORE_EXPERTS = ["gpt_oss/mxfp4:4:ep+", "mixtral/int4:4:tp+", "mixtral/int8:4:ep+", "gpt_oss/int8:2:tp+"]


@pytest.mark.parametrize("cases", [EXPERTS, pytest.param(MORE_EXPERTS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_experts_equal_one_device(cases):
    """Shares of packed experts are those of one device's arrays; so are the logits."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.quantised_experts", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {case: float(error) for case, error in (line.split() for line in done.stdout.splitlines())}
    assert set(errors) == set(cases) and all(error < 1e-5 for error in errors.values()), errors
