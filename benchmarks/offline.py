"""Throughput of ``LLM.generate`` on a real length mix, prefix-cache gain, and the share of a step spent in submit.

    python -m benchmarks.offline [--model smollm2] [--requests 64]

Three parts, each with a ratio: (1) random lengths through the engine: tokens per second and KV slots allocated but
unused; (2) time to first token of 2,000-token prompts of which 90 % is shared, against the same with the prefix
cache off, interleaved; (3) ``submit`` as a share of the step at 8 requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path


def spread(values: list[float], digits: int = 4) -> dict:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "n": len(values),
    }


def make_llm(model: str, **changes):
    from lmjax import LLM

    return LLM(model, **({"max_model_len": 4096} | changes))


def throughput(model: str, requests: int, seed: int) -> dict:
    from benchmarks.serve import lengths
    from lmjax import SamplingParams

    rng = random.Random(seed)
    llm = make_llm(model)
    try:
        vocab = 1000
        prompts = [[rng.randrange(10, vocab) for _ in range(lengths(rng, 150, 340, 2000))] for _ in range(requests)]
        params = [
            SamplingParams(temperature=0.0, max_tokens=lengths(rng, 140, 220, 1000), ignore_eos=True) for _ in prompts
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        generated = sum(len(o.outputs[0].token_ids) for o in outputs)
        stats = llm.stats()
        return {
            "requests": requests,
            "output_tokens_per_second": round(generated / seconds, 2),
            "total_tokens_per_second": round((generated + sum(map(len, prompts))) / seconds, 2),
            "padded_share": round(stats.padded_tokens / max(1, stats.padded_tokens + stats.scheduled_tokens), 4),
            "host_share_of_time": round(stats.step_host_seconds / seconds, 4),
        }
    finally:
        llm.close()


def prefix_cache(model: str, rounds: int, seed: int) -> dict:
    from lmjax import SamplingParams

    rng = random.Random(seed)
    on, off = (make_llm(model, enable_prefix_caching=flag, max_num_seqs=8) for flag in (True, False))
    try:
        shared = [rng.randrange(10, 1000) for _ in range(1800)]
        params = SamplingParams(temperature=0.0, max_tokens=1)
        on.generate([[*shared, 5]], params, use_tqdm=False)
        times: dict[str, list[float]] = {"on": [], "off": []}
        for _ in range(rounds):
            prompt = shared + [rng.randrange(10, 1000) for _ in range(200)]
            for name, llm in (("on", on), ("off", off)):
                start = time.perf_counter()
                llm.generate([prompt], params, use_tqdm=False)
                times[name].append(time.perf_counter() - start)
        ratios = [b / a for a, b in zip(times["on"], times["off"], strict=True)]
        return {"ttft_on": spread(times["on"]), "ttft_off": spread(times["off"]), "gain": spread(ratios, 2)}
    finally:
        on.close()
        off.close()


def submit_share(model: str, steps: int, seed: int) -> dict:
    """At 8 running requests: seconds in ``submit`` over the seconds of a step."""
    from lmjax import SamplingParams

    rng = random.Random(seed)
    llm = make_llm(model, max_num_seqs=8)
    executor, spent = llm._engine.executor, []
    submit = executor.submit

    def timed(plan):
        start = time.perf_counter()
        try:
            return submit(plan)
        finally:
            if plan.num_decode == 8:
                spent.append((start, time.perf_counter() - start))

    executor.submit = timed
    try:
        prompts = [[rng.randrange(10, 1000) for _ in range(20)] for _ in range(8)]
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.close()
    step = [b[0] - a[0] for a, b in itertools.pairwise(spent)]
    shares = [s[1] / d for s, d in zip(spent, step, strict=False)]
    return {"step_seconds": spread(step), "submit_seconds": spread([s[1] for s in spent]), "share": spread(shares)}


PARTS = {"throughput": throughput, "prefix_cache": prefix_cache, "submit_share": submit_share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "offline.json"))
    args = parser.parse_args()
    counts = {"throughput": args.requests, "prefix_cache": args.rounds, "submit_share": args.steps}
    results = {}
    for part in args.parts.split(","):
        results[part] = PARTS[part](args.model, counts[part], args.seed)
        print(part, json.dumps(results[part], indent=1), flush=True)
    Path(args.output).parent.mkdir(exist_ok=True)
    Path(args.output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
