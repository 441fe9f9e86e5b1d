"""What ``--deterministic`` keeps, and what it costs.

    python -m benchmarks.deterministic [--runs 1000] [--control 60] [--rounds 4] [--output FILE]

Three parts. (1) One prompt, drawn at random from a fixed seed, among random neighbours, lengths, chunkings, budgets,
pools that are too small, with prefix cache and without: how many different token sequences and sets of
log-probability bits come out, and whether the same tokens scored as a prompt have the same bits. SmolLM2's layer
shapes and vocabulary, ``--layers`` of them, random weights. (2) The control: the same without the flag. (3) Seconds
with the flag over seconds without, interleaved A B A B, the whole embedded model: decode at 1, 8 and 32 requests, and
a prefill.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = [random.Random(99).randrange(10, 40000) for _ in range(77)]
NEW_TOKENS = 24
# budgets (so chunkings and bucket sizes), rows, pools; 18 blocks hold little more than the longest request
ENGINES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 32, "max_num_batched_tokens": 256},
    {"max_num_seqs": 6, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 18},
    {"max_num_seqs": 16, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
    {"max_num_seqs": 24, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 19},
    {"max_num_seqs": 12, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 40, "async_scheduling": False},
)
Bits = tuple[tuple[int, ...], bytes]


def make_llm(layers: int | None, **settings: Any) -> Any:
    from lmjax import LLM

    if layers is not None:
        settings |= {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": layers}}
    return LLM("smollm2", **({"max_model_len": 512, "max_logprobs": 2} | settings))


def drawn(output: Any) -> Bits:
    """Tokens of an answer and the bits of their log-probabilities."""
    out = output.outputs[0]
    values = [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
    return tuple(out.token_ids), np.asarray(values, np.float32).tobytes()


def scored(output: Any, tokens: tuple[int, ...]) -> bytes:
    """The same of tokens that end a prompt."""
    values = [step[token].logprob for step, token in zip(output.prompt_logprobs[-len(tokens) :], tokens, strict=True)]
    return np.asarray(values, np.float32).tobytes()


def random_neighbours(rng: random.Random, count: int) -> tuple[list[list[int]], list[Any]]:
    from lmjax import SamplingParams

    prompts, params = [], []
    for _ in range(count):
        shared = PROMPT[: rng.randrange(len(PROMPT))] if rng.random() < 0.3 else []
        prompts.append(shared + [rng.randrange(10, 40000) for _ in range(rng.randrange(1, 120))])
        params.append(
            SamplingParams(
                temperature=rng.choice((0.0, 0.7, 1.3)),
                top_k=rng.choice((0, 0, 20)),
                presence_penalty=rng.choice((0.0, 0.0, 0.5)),
                logprobs=rng.choice((None, 1)),
                max_tokens=rng.randrange(1, 30),
                ignore_eos=True,
            )
        )
    return prompts, params


def one_wave(llm: Any, rng: random.Random, most: int) -> tuple[list[Bits], list[bool]]:
    """The prompt, up to six times, somewhere among neighbours: its bits, and whether scoring gives the same."""
    from lmjax import SamplingParams

    mine = SamplingParams(temperature=0.8, seed=5, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    prompts, params = random_neighbours(rng, rng.choice((0, 1, 3, 7, 15, most)))
    places = set()
    for _ in range(rng.randrange(1, 7)):
        at = rng.randrange(len(prompts) + 1)
        places = {place + (place >= at) for place in places} | {at}
        prompts.insert(at, PROMPT)
        params.insert(at, mine)
    if rng.random() < 0.3:  # a prompt to score among them
        prompts.append(PROMPT[:40])
        params.append(SamplingParams(max_tokens=1, prompt_logprobs=0))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [drawn(outputs[place]) for place in sorted(places)]
    tokens, bits = found[0]
    again = llm.generate([PROMPT + list(tokens)], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return found, [scored(again[0], tokens) == bits]


def repeat(
    runs: int,
    deterministic: bool,
    layers: int,
    seed: int = 0,
    most: int = 40,
    engines: Sequence[dict[str, Any]] = ENGINES,
    **settings: Any,
) -> dict[str, Any]:
    """At least ``runs`` runs over all ``engines``; each of them is a start of its own. ``settings``: of all of them."""
    rng = random.Random(seed)
    found: Counter[Bits] = Counter()
    equal: list[bool] = []
    preemptions = hits = compiles = 0
    for i, engine in enumerate(engines):
        llm = make_llm(layers, deterministic=deterministic, **engine, **settings)
        try:
            while found.total() < runs * (i + 1) / len(engines):
                bits, same = one_wave(llm, rng, most)
                found.update(bits)
                equal += same
            stats = llm.stats()
            preemptions, hits = preemptions + stats.preemptions, hits + stats.prefix_hits
            compiles += stats.compiles
        finally:
            llm.close()
    return {
        "runs": found.total(),
        "token_sequences": len({tokens for tokens, _ in found}),
        "logprob_bit_sets": len(found),
        "digest": hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16],
        "scored_as_prompt": len(equal),
        "scored_equal_to_sampled": sum(equal),
        "preemptions": preemptions,
        "prefix_hit_tokens": hits,
        "compiles_after_ready": compiles,
    }


def cost(rounds: int, budget: int = 512, layers: int | None = None) -> dict[str, Any]:
    """Ratios of seconds, with the flag over without."""
    from lmjax import SamplingParams

    rng = random.Random(3)
    settings: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": budget}
    settings |= {"kv_cache_memory_bytes": 1 << 29, "enable_prefix_caching": False}
    llms = [make_llm(layers, deterministic=flag, **settings) for flag in (False, True)]

    def seconds(llm: Any, prompts: list[list[int]], new: int) -> tuple[float, float]:
        """On the clock, and of all threads."""
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        start, work = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, time.process_time() - work

    cases = {f"decode_{n}": ([[rng.randrange(10, 40000)] * 8 for _ in range(n)], 32) for n in (8, 32, 1)}
    cases["prefill_400"] = ([[rng.randrange(10, 40000) for _ in range(400)]], 1)
    found: dict[str, Any] = {}
    try:
        for name, (prompts, new) in cases.items():
            for llm in llms:
                seconds(llm, prompts, min(new, 4))
            pairs = [[seconds(llm, prompts, new) for llm in llms] for _ in range(rounds)]
            ratios = [with_flag[0] / without[0] for without, with_flag in pairs]
            work = [with_flag[1] / without[1] for without, with_flag in pairs]
            found[name] = {
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "cpu_seconds_ratio_median": round(statistics.median(work), 3),  # for a machine that others use, too
                "seconds_without": [round(pair[0][0], 3) for pair in pairs],
                "seconds_with": [round(pair[1][0], 3) for pair in pairs],
                "cpu_seconds_without": [round(pair[0][1], 3) for pair in pairs],
                "cpu_seconds_with": [round(pair[1][1], 3) for pair in pairs],
            }
            print(name, json.dumps(found[name]), flush=True)
    finally:
        for llm in llms:
            llm.close()
    return found


def main() -> None:
    import jax

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="with the flag; 0: none")
    parser.add_argument("--control", type=int, default=60, help="runs without the flag; 0: none")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="pairs of the cost; 0: none")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step in the cost; smaller compiles less")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/deterministic.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {"jax": jax.__version__, "machine": platform.processor() or platform.machine()}
    if args.output.exists():
        result = json.loads(args.output.read_text()) | result
    if args.rounds:
        result["cost"] = cost(args.rounds, args.budget)
    for name, runs, flag in (("control", args.control, False), ("deterministic", args.runs, True)):
        if runs:
            result[name] = {"layers": args.layers} | repeat(runs, flag, args.layers, max_model_len=256)
            print(name, json.dumps(result[name]), flush=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
