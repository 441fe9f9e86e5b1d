"""Runs on 8 CPU devices, in a process of its own: an engine on a mesh gives one device's answers."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from lmjax import LLM, SamplingParams
from tests import tiny
from tests.fakes import run_requests
from tests.fixtures import write_tokenizer
from tests.parallel.sharded_forward import COMMON, MODELS
from tests.runtime.requests import Limited, random_requests, scheduler_config
from tests.runtime.test_equality import check_equal
from tests.runtime.tiny import tiny_executor

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


LAYERS = 7  # neither 2 nor 4 stages divide them


def sizes(case: str) -> dict[str, int]:
    """ "4": tensor parallel, "2x4": pipeline stages of so many devices each."""
    *stages, tp = map(int, case.split("x"))
    return {"tensor_parallel_size": tp} | ({"pipeline_parallel_size": stages[0]} if stages else {})


def requests(count: int, layers: int, cases: list[str]) -> None:
    """Random requests on the tiny Llama, in a pool that is too small for them; preemption by recompute and by swap."""
    asked = random_requests(count, seed=11)
    arrivals = {r.handle: int(np.random.default_rng(r.handle).integers(0, count)) for r in asked}

    def answers(swap: bool, **settings: int):
        executor = Limited(
            tiny_executor(layers=layers, swap_space=0.004, **settings), num_blocks=26, mutate=True, host=swap
        )
        config = scheduler_config(
            max_num_batched_tokens=executor.info.token_buckets[-1], preemption_mode="swap" if swap else "auto"
        )
        found, scheduler = run_requests(asked, config, executor.info, executor, arrivals=arrivals)
        stats = scheduler.stats()
        assert (stats.swaps_in > 0) == swap, stats
        device = executor.executor.stats()
        assert device["compiles_total"] == 0
        # one program at a time on a CPU mesh: it is waited for where it is dispatched
        assert (device["submit_wait_seconds"] > 0) == bool(settings), device
        assert stats.preemptions > 0 and stats.prefix_hits > 0, stats
        return found

    alone = answers(swap=False)
    for case in cases:
        for swap in (False, True):
            check_equal(asked, alone, answers(swap, **sizes(case)))
        print(f"{case} equal", flush=True)


def smollm2(cases: list[str]) -> None:
    """The embedded model: 30 layers, 9 query heads on 3 KV heads, tied embeddings."""
    prompts = ["The capital of France is", "Once upon a time", "def fib(n):\n    ", "Water boils at"] * 3

    def answers(**settings: int):
        small = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
        llm = LLM("smollm2", num_gpu_blocks_override=128, **small, **settings)
        try:
            params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
            return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        finally:
            llm.close()

    alone = answers()
    for case in cases:
        assert answers(**sizes(case)) == alone, case
        print(f"{case} equal", flush=True)


def family(name: str, case: str, how: str) -> None:
    """A family's random weights: greedy tokens and their log-probabilities."""
    path = Path(tempfile.mkdtemp())
    config = {**COMMON, **MODELS[name]} if name in MODELS else tiny.CASES[name].config
    config = config | {"vocab_size": 600, "bos_token_id": 0, "eos_token_id": 0}
    if "x" in case:
        config |= {"n_layer" if "n_layer" in config else "num_hidden_layers": LAYERS, "mlp_only_layers": []}
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
    together = answers(**sizes(case), enable_expert_parallel=how == "ep")
    for one, many in zip(alone, together, strict=True):
        assert one.token_ids == many.token_ids
        a, b = ([step[t].logprob for step, t in zip(x.logprobs, x.token_ids, strict=True)] for x in (one, many))
        np.testing.assert_allclose(a, b, atol=1e-4)
    print(f"{name} {case} {how} equal", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["requests", count, layers, *cases]:
            requests(int(count), int(layers), cases)
        case ["smollm2", *cases]:
            smollm2(cases)
        case ["families", *cases]:
            for one in cases:
                family(*one.split(":"))
