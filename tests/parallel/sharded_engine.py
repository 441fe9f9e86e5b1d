"""Runs on 8 CPU devices, in a process of its own: an engine on a mesh gives one device's answers."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from lmjax import LLM, SamplingParams
from tests.fakes import run_requests
from tests.fixtures import write_tokenizer
from tests.parallel.sharded_forward import COMMON, MODELS
from tests.runtime.requests import Limited, random_requests, scheduler_config
from tests.runtime.test_equality import check_equal
from tests.runtime.tiny import tiny_executor

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def requests(count: int, sizes: list[int]) -> None:
    """Random requests on the tiny Llama, in a pool that is too small for them; preemption both ways."""
    asked = random_requests(count, seed=11)
    arrivals = {r.handle: int(np.random.default_rng(r.handle).integers(0, count)) for r in asked}

    def answers(tp: int, swap: bool):
        executor = Limited(tiny_executor(tensor_parallel_size=tp, swap_space=0.002), num_blocks=26, host=swap)
        config = scheduler_config(preemption_mode="swap" if swap else "auto")
        found, scheduler = run_requests(asked, config, executor.info, executor, arrivals=arrivals)
        stats = scheduler.stats()
        assert (stats.swaps_in > 0) == swap, stats
        assert executor.executor.stats()["compiles_total"] == 0
        assert stats.preemptions > 0 and stats.prefix_hits > 0, stats
        return found

    alone = answers(1, swap=False)
    for tp in sizes:
        for swap in (False, True):
            check_equal(asked, alone, answers(tp, swap))
        print(f"tp {tp} equal", flush=True)


def family(name: str, tp: int, how: str) -> None:
    """A family's random weights: greedy tokens and their log-probabilities."""
    path = Path(tempfile.mkdtemp())
    config = {**COMMON, **MODELS[name], "vocab_size": 600, "bos_token_id": 0, "eos_token_id": 0}
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(5, 500, n).tolist() for n in (3, 17, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)

    def answers(**settings):
        small = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40, "load_format": "dummy"}
        llm = LLM(str(path), **small, **settings)
        try:
            return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        finally:
            llm.close()

    alone = answers()
    together = answers(tensor_parallel_size=tp, enable_expert_parallel=how == "ep")
    for one, many in zip(alone, together, strict=True):
        assert one.token_ids == many.token_ids
        a, b = ([step[t].logprob for step, t in zip(x.logprobs, x.token_ids, strict=True)] for x in (one, many))
        np.testing.assert_allclose(a, b, atol=1e-4)
    print(f"{name} {tp} {how} equal", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "requests":
        requests(int(sys.argv[2]), [int(size) for size in sys.argv[3:]])
    else:
        for case in sys.argv[2:]:
            name, tp, how = case.split(":")
            family(name, int(tp), how)
