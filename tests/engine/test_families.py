"""Families with other layers than Llama's through the whole engine, prompts of several lengths at once, against
transformers' greedy tokens (tests/goldens/families.npz)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmjax import LLM, SamplingParams
from tests import tiny, tiny_families
from tests.fixtures import write_tokenizer

GOLDENS = np.load(Path(__file__).parent.parent / "goldens" / "families.npz")
QUICK = ("gemma3", "gpt2")  # compiling takes the time


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in tiny_families.GREEDY]
)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    write_tokenizer(tiny.write(name, tmp_path), num_bytes=64)  # no more tokens than the model has
    prompts = [ids.tolist() for ids in tiny.prompts(name)]
    params = SamplingParams(temperature=0.0, max_tokens=tiny.CASES[name].greedy, ignore_eos=True)
    # chunks of 8 tokens, and blocks behind a window are used again
    llm = LLM(str(tmp_path), max_num_seqs=4, max_num_batched_tokens=8, num_gpu_blocks_override=40)
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.close()
    check(name, outputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_blocks_of_latent_vectors_move_like_others(mode, tmp_path):
    """Prefix hits, forks and preemption: the pool has room for some of what asks at once."""
    name = "deepseek_v3"
    write_tokenizer(tiny.write(name, tmp_path), num_bytes=64)
    prompts = [ids.tolist() for ids in tiny.prompts(name)]
    params = SamplingParams(temperature=0.0, max_tokens=tiny.CASES[name].greedy, ignore_eos=True, n=2)
    pool = {"num_gpu_blocks_override": 18, "block_size": 8, "swap_space": 0.01, "preemption_mode": mode}
    llm = LLM(str(tmp_path), max_num_seqs=8, max_num_batched_tokens=16, **pool)
    try:
        outputs = llm.generate(prompts * 3, params, use_tqdm=False)
        stats = llm.stats()
    finally:
        llm.close()
    for i in range(0, len(outputs), len(prompts)):
        check(name, outputs[i : i + len(prompts)])
    assert stats.preemptions > 0 and (stats.swaps_in > 0) == (mode == "swap"), stats
    assert stats.prefix_hits > 0, stats


def check(name, outputs):
    for i, output in enumerate(outputs):
        assert GOLDENS[f"{name}/gap/{i}"] > 1e-4
        assert all(found.token_ids == GOLDENS[f"{name}/greedy/{i}"].tolist() for found in output.outputs)
