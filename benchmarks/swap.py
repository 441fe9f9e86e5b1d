"""Preemption by swap against recompute, and whether the cost rule takes the better: paired runs on one set of programs.

    python -m benchmarks.swap [--model smollm2] [--rounds 4] [--cycles 10]

A long request (2,048 tokens and more) runs; again and again two short ones of higher priority come. The first takes all
free blocks and one more, which pushes the long one out; the second takes 15 of its blocks. Then it comes back: a cycle.
Every round runs each way once: ``recompute`` (no host tier), ``swap`` and ``auto``. Ratios are of the speeds in the
same cycle of the same round; by CPU time as well, which other processes on the machine disturb less.

Parts: ``fast``: transfers as they are; ``no_prefix_cache``: the same without a prefix cache, so that recompute computes
all of the long one again; ``slow``: each transfer is made to take longer than computing its tokens again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.offline import spread

WAYS = ("recompute", "swap", "auto")
LONG, LONG_REPLY = 2048, 190  # tokens
SHORT = 240  # prompt tokens of the second short request
POOL = 141  # blocks
SLOW_SECONDS = 2.0  # of a transfer in the part ``slow``


class Run:
    """One run: a scheduler of its own on a shared executor, in the engine's loop."""

    def __init__(self, executor, way: str, cycles: int, caching: bool, seed: int):
        from lmjax.config import SchedulerConfig
        from lmjax.core.scheduler import Scheduler

        info = executor.info if way != "recompute" else replace(executor.info, host=None)
        config = SchedulerConfig(
            max_num_batched_tokens=info.token_buckets[-1],
            enable_prefix_caching=caching,
            scheduling_policy="priority",
            preemption_mode=way if way != "recompute" else "auto",
        )
        self.executor, self.scheduler = executor, Scheduler(config, info)
        self.cycles, self.rng = cycles, np.random.default_rng(seed)
        self.handle = self.tokens = self.last = 0
        self.cycle_starts: list[tuple[float, float, int]] = []  # seconds, CPU seconds, tokens so far
        self.short: set[int] = set()
        self.answers: dict[int, list[int]] = {}

    def add(self, length: int, reply: int, priority: int) -> int:
        from lmjax import SamplingParams
        from lmjax.core.request import NewRequest

        prompt = self.rng.integers(10, 1000, length).astype(np.int32)
        params = SamplingParams(temperature=0.0, max_tokens=reply)
        self.scheduler.add(NewRequest(self.handle, prompt, params, priority=priority))
        self.answers[self.handle] = []
        self.handle += 1
        return self.handle - 1

    def next_short(self) -> None:
        """When the long one alone runs and has had its turn."""
        state = self.scheduler.state
        if self.short or self.cycles < 0 or self.tokens - self.last < 2 or state.requests[0].slot < 0:
            return
        tokens = sum(map(len, self.answers.values()))
        self.cycle_starts.append((time.perf_counter(), time.process_time(), tokens))
        self.cycles -= 1
        if self.cycles < 0:
            self.scheduler.abort([0])
            return
        length = state.kv.num_free * self.scheduler.info.block_size - 4
        if length <= 0:
            raise RuntimeError("the long request has outgrown the pool: fewer --cycles")
        self.short = {self.add(length, 16, priority=0), self.add(SHORT, 4, priority=1)}

    def read(self, output) -> None:
        handles, rows = output.arrays()
        for handle, token in zip(handles.tolist(), rows[:, 0].tolist(), strict=True):
            self.answers[handle].append(token)
            self.tokens += handle == 0
        for end in output.finished:
            self.short.discard(end.handle)
            self.last = self.tokens

    def speeds(self) -> list[tuple[float, float]]:
        """Tokens a second of each cycle, and a CPU second."""
        self.add(LONG, LONG_REPLY, priority=2)
        before = None
        while self.scheduler.has_work() or before is not None:
            if self.tokens:
                self.next_short()
            plan = self.scheduler.schedule()
            running = None if plan is None else (plan, self.executor.submit(plan))
            if before is not None:
                self.read(self.scheduler.update(before[0], self.executor.collect(before[1])))
            before = running
        return [
            ((b[2] - a[2]) / (b[0] - a[0]), (b[2] - a[2]) / (b[1] - a[1]))
            for a, b in itertools.pairwise(self.cycle_starts)
        ]


def measure(executor, rounds: int, cycles: int, caching: bool, seed: int, tell) -> None:
    """tell: gets the results so far after each round."""
    speeds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    counts: dict[str, Counter] = {way: Counter() for way in WAYS}
    for i in range(rounds):
        answers = {}
        for way in WAYS[i % 3 :] + WAYS[: i % 3]:
            run = Run(executor, way, cycles, caching, seed + i)
            found = run.speeds()
            speeds[way] += found
            stats = run.scheduler.stats()
            new = Counter(
                preemptions=stats.preemptions,
                swaps_out=stats.swaps_out,
                swaps_in=stats.swaps_in,
                blocks_out=stats.swapped_out_blocks,
                blocks_in=stats.swapped_in_blocks,
                computed_tokens=stats.scheduled_tokens,
            )
            counts[way] += new
            answers[way] = run.answers[0]
            print(f"round {i} {way}: {statistics.median(s for s, _ in found):.2f} tokens/s", dict(new), flush=True)
        shortest = min(map(len, answers.values()))
        same = len({tuple(answer[:shortest]) for answer in answers.values()}) == 1
        print(f"round {i}: the long request's tokens are {'the same' if same else 'different'}", flush=True)
        tell(summary(speeds, counts, i + 1))


def summary(speeds: dict[str, list[tuple[float, float]]], counts: dict[str, Counter], rounds: int) -> dict:
    medians = {way: statistics.median(wall for wall, _ in speeds[way]) for way in WAYS}
    better = "swap" if medians["swap"] >= medians["recompute"] else "recompute"

    def ratios(way: str, base: str) -> dict:
        pairs = list(zip(speeds[way], speeds[base], strict=True))
        return {"wall": spread([a[0] / b[0] for a, b in pairs]), "cpu": spread([a[1] / b[1] for a, b in pairs])}

    return {
        "rounds": rounds,
        "tokens_per_second": {way: spread([wall for wall, _ in speeds[way]], 2) for way in WAYS},
        "tokens_per_cpu_second": {way: spread([cpu for _, cpu in speeds[way]], 2) for way in WAYS},
        "swap / recompute": ratios("swap", "recompute"),
        "better": better,
        "auto / better": ratios("auto", better),
        "counts": {way: dict(counts[way]) for way in WAYS},
        "context_tokens_at_a_preemption": f"{LONG} and more",
    }


def slowed(executor) -> None:
    """Makes every transfer take ``SLOW_SECONDS``, and measures them anew as a start does."""
    from lmjax.runtime import host_pool

    host = executor._device.host

    def late(function):
        def call(*arguments):
            time.sleep(SLOW_SECONDS)
            return function(*arguments)

        return call

    host.keep, host.stage = late(host.keep), late(host.stage)
    out, back = host_pool.measure(executor._device, 1, len(executor.info.kv_specs))
    executor.info = replace(executor.info, host=replace(executor.info.host, out_seconds=out, in_seconds=back))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=10, help="preemptions of a run")
    parser.add_argument("--parts", default="fast,no_prefix_cache,slow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "swap.json"))
    args = parser.parse_args()

    from lmjax.config import EngineConfig
    from lmjax.runtime.executor import build_executor

    config = EngineConfig(
        model=args.model, max_model_len=2240, max_num_seqs=4, num_gpu_blocks_override=POOL, swap_space=1.0
    )
    executor = build_executor(config)
    path = Path(args.output)
    results = json.loads(path.read_text()) if path.exists() else {}
    for part in args.parts.split(","):
        if part == "slow":
            slowed(executor)
        caching = part != "no_prefix_cache"
        start = {"transfer_seconds_at_start": [executor.info.host.out_seconds, executor.info.host.in_seconds]}

        def tell(found, part=part, start=start):
            results[part] = found | start
            path.write_text(json.dumps(results, indent=1) + "\n")

        measure(executor, args.rounds, args.cycles, caching, args.seed, tell)
        assert executor.stats()["compiles_total"] == 0
        print(part, json.dumps(results[part], indent=1), flush=True)


if __name__ == "__main__":
    main()
