"""Engines on several devices give one device's answers, and what cannot be spread is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lmjax import LLM
from lmjax.config import ConfigError, EngineConfig
from tests.fixtures import model_dir

FAMILIES = ("mixtral:4:ep", "smol:3:tp", "llama:8:tp", "mixtral:8:tp", "qwen2_moe:2:ep", "qwen2_moe:4:tp")


def run_apart(*arguments, timeout=280):
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.sharded_engine", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("requests", "degrees"), [(24, ("4",)), pytest.param(200, ("2", "4"), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_answers_are_those_of_one_device(requests, degrees):
    """All sampling features, prefix hits and preemption; at 4 devices each KV head lies on two."""
    assert run_apart("requests", str(requests), *degrees).count("equal") == len(degrees)


@pytest.mark.slow  # the forward of each family: test_sharded_forward.py
@pytest.mark.parametrize("case", FAMILIES)
def test_families(case):
    assert run_apart("families", case).count("equal") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 64}, "--tensor-parallel-size: got 64, but"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel: a llama model has no experts"),
    ],
)
def test_what_cannot_be_spread_is_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        LLM(str(model_dir("RAND")), max_num_seqs=2, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: got 0"):
        EngineConfig(tensor_parallel_size=0).validate()
