"""What the host costs a step: reading arrivals, planning, packing, reading results, encoding records.

The load: R running requests (stop strings and log-probabilities on), and in every step 2 arrive, 2 end and about R/16
fill a block. The executor is a fake that takes no time; its own work is not counted.

    python -m benchmarks.scheduler [--json FILE] [--repeats 5]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lmjax.config import SchedulerConfig
from lmjax.core.output import StepOutput
from lmjax.core.plan import ExecutorInfo, StepPlan, unpack_rows
from lmjax.core.scheduler import Scheduler
from lmjax.engine.columns import new_request, step_record
from lmjax.engine.engine import Engine
from lmjax.engine.records import AddRequest, Inbound, Shutdown
from lmjax.runtime.buckets import Buckets
from lmjax.runtime.inputs import InputPacker
from lmjax.types import KVSpec, SamplingParams
from tests.fakes import FakeExecutor

BUDGET = 2048
VOCAB = 50_000
ENDS = 2  # requests that arrive and that end in a step


class Load:
    """R requests whose ends are spread evenly over the coming steps, and the arrivals that replace them."""

    def __init__(self, running: int, waiting: int, context: int, overlap_seconds: float = 0.0):
        self.running, self.waiting, self.context = running, waiting, context
        self.rng = np.random.default_rng(0)
        self.buckets = Buckets(running, BUDGET)
        most = max(context, 256) + running // ENDS + 64
        blocks = (running + 8) * (-(-most // 16)) + 1
        self.info = ExecutorInfo(
            (KVSpec("full", tuple(range(32)), 8, 128, 128),),
            (blocks,),
            16,
            running,
            most,
            VOCAB,
            5,
            (*self.buckets.token_buckets, running * most),  # all prompts of the running requests enter in one step
        )
        self.executor = FakeExecutor(self.info, cheap=True, step_seconds=overlap_seconds)
        self.scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=running * most), self.info)
        self.packer = InputPacker(self.buckets, max_num_seqs=running, block_size=16, num_groups=1)
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(Inbound)
        self._next_handle = 0
        self.in_flight: tuple[StepPlan, Any] | None = None
        self.output: StepOutput | None = None  # the latest

    def message(self, prompt_tokens: int, max_tokens: int) -> bytes:
        prompt = self.rng.integers(0, VOCAB, prompt_tokens, dtype=np.int32)
        params = SamplingParams(stop=["\n\n", "END"], logprobs=5, max_tokens=max_tokens, temperature=0.8, top_p=0.95)
        handle = self._next_handle
        self._next_handle += 1
        return self.encoder.encode(AddRequest(handle, prompt.tobytes(), params, (2,), arrival=time.monotonic()))

    def arrival(self) -> bytes:
        return self.message(int(self.rng.integers(100, 200)), self.running // ENDS)

    def add(self, messages: list[bytes]) -> None:
        for message in messages:
            self.scheduler.add(new_request(self.decoder.decode(message)))

    def fill(self) -> None:
        """Prefills the running requests, then lets the others queue."""
        ends = [16 + i // ENDS for i in range(self.running)]
        lengths = self.context - 16 + self.rng.integers(0, 16, self.running)
        self.add([self.message(int(n), end) for n, end in zip(lengths, ends, strict=True)])
        plan = self.scheduler.schedule()
        assert plan is not None and plan.num_rows == self.running
        for load in plan.slot_loads:
            self.packer.load_slot(load)
        self.scheduler.update(plan, self.executor.collect(self.executor.submit(plan)))
        self.add([self.arrival() for _ in range(self.waiting)])
        gc.collect()
        gc.freeze()  # as the engine's process does once it is ready


def step_times(load: Load, steps: int) -> dict[str, np.ndarray]:
    """Seconds of each part of each step, with two steps in flight as in the engine's loop."""
    parts: dict[str, list[float]] = {name: [] for name in ("arrivals", "schedule", "pack", "update", "encode")}
    scheduler, clock = load.scheduler, time.perf_counter
    for _ in range(steps):
        messages = [load.arrival() for _ in range(ENDS)]
        t0 = clock()
        load.add(messages)
        t1 = clock()
        plan = scheduler.schedule()
        t2 = clock()
        assert plan is not None
        for slot_load in plan.slot_loads:
            load.packer.load_slot(slot_load)
        load.packer.pack(plan)
        t3 = clock()
        in_flight = load.executor.submit(plan)
        if load.in_flight is not None:
            before = load.in_flight
            result = load.executor.collect(before[1])
            t4 = clock()
            output = scheduler.update(before[0], result)
            t5 = clock()
            load.encoder.encode(step_record(output))
            t6 = clock()
            for name, seconds in zip(parts, (t1 - t0, t2 - t1, t3 - t2, t5 - t4, t6 - t5), strict=True):
                parts[name].append(seconds)
            load.output = output
        load.in_flight = (plan, in_flight)
    return {name: np.array(values) for name, values in parts.items()}


def step_cost(running: int, waiting: int = 0, context: int = 256, repeats: int = 5, steps: int = 150) -> dict[str, Any]:
    """Milliseconds of a step: medians over the steps, of the repeat with the lowest total."""
    best: dict[str, Any] | None = None
    least_hash = math.inf
    for _ in range(repeats):
        load = Load(running, waiting, context)
        load.fill()
        step_times(load, 16)  # from here on, requests end
        hashed = load.scheduler.stats().hash_seconds
        times = step_times(load, min(steps, running // ENDS))
        total = sum(times[name] for name in ("arrivals", "schedule", "pack", "update"))
        found = {name: round(1e3 * float(np.median(values)), 4) for name, values in times.items()}
        found["total"] = round(1e3 * float(np.median(total)), 4)
        found["hash_and_look_up"] = round(1e3 * (load.scheduler.stats().hash_seconds - hashed) / len(total), 4)
        least_hash = min(least_hash, found["hash_and_look_up"])
        if best is None or found["total"] < best["total"]:
            best = found
    assert best is not None
    best["hash_and_look_up"] = least_hash  # a mean, which other processes disturb
    return {"running": running, "waiting": waiting, "context": context, **best}


class TokenRecord(msgspec.Struct, array_like=True):
    """One row of a step, as a channel with a record per token would send it."""

    handle: int
    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def token_records(output: StepOutput) -> list[TokenRecord]:
    handles, rows = output.arrays()
    columns = unpack_rows(rows)
    assert len(handles) and output.width > 1
    return [TokenRecord(*row) for row in zip(*(array.tolist() for array in (handles, *columns)), strict=True)]


def encoding_cost(running: int = 256, repeats: int = 5, calls: int = 500) -> dict[str, float]:
    """Microseconds that a step's news takes to become bytes, least of the repeats. All three are the same news.

    ``step``: from the scheduler's output, as the engine does it. ``bare``: msgspec alone on the finished record.
    ``per_token``: msgspec alone on finished records of one token each.
    """
    load = Load(running, 0, 256)
    load.fill()
    step_times(load, 24)
    output, encode = load.output, load.encoder.encode
    assert output is not None
    record, rows = step_record(output), token_records(output)

    def least(run: Callable[[], object], count: int) -> float:
        return round(1e6 * min(timeit.repeat(run, number=count, repeat=repeats)) / count, 2)

    return {
        "step": least(lambda: encode(step_record(output)), calls),
        "bare": least(lambda: encode(record), calls),
        "per_token": least(lambda: encode(rows), max(1, calls // 20)),
    }


def exponent(small: dict[str, Any], large: dict[str, Any], axis: str) -> float:
    """e of cost ~ axis^e between two measurements."""
    return round(math.log(large["total"] / small["total"]) / math.log(large[axis] / max(small[axis], 1)), 3)


def loop_overhead(running: int = 256, step_seconds: float = 0.005, steps: int = 200) -> dict[str, float]:
    """Step time of the engine's loop on an executor that sleeps, over that of a loop that only submits and collects."""
    load = Load(running, 0, 256, step_seconds)
    load.fill()
    published: list[bytes] = []
    engine = Engine(load.scheduler, load.executor, lambda record: published.append(load.encoder.encode(record)))
    plan = load.scheduler.schedule()
    assert plan is not None
    load.scheduler.update(plan, load.executor.collect(load.executor.submit(plan)))

    done = 0

    def receive(timeout: float | None) -> list[Inbound]:
        nonlocal done
        done += 1
        if done > steps:
            return [Shutdown()]
        return [load.decoder.decode(load.arrival()) for _ in range(ENDS)]

    began = len(published)
    ours = _per_step(lambda: engine.run(receive), steps)
    assert len(published) - began >= steps - 1
    bare_executor = FakeExecutor(load.info, cheap=True, step_seconds=step_seconds)

    def bare() -> None:
        before = bare_executor.submit(plan)
        for _ in range(steps - 1):
            now = bare_executor.submit(plan)
            bare_executor.collect(before)
            before = now
        bare_executor.collect(before)

    alone = _per_step(bare, steps)
    return {"engine_ms": round(ours, 3), "bare_ms": round(alone, 3), "ratio": round(ours / alone, 4)}


def _per_step(run: Callable[[], None], steps: int) -> float:
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there ('-': standard output)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    out = sys.stderr if args.json == "-" else sys.stdout

    def show(text: str) -> None:
        print(text, file=out, flush=True)

    def cost(**axes: int) -> dict[str, Any]:
        found = step_cost(repeats=args.repeats, **axes)
        show(
            "running {running:5d}  waiting {waiting:6d}  context {context:6d}:  {total:.3f} ms ="
            " arrivals {arrivals:.3f} + schedule {schedule:.3f} + pack {pack:.3f} + update {update:.3f}"
            "   (hash and look-up {hash_and_look_up:.3f}; encode {encode:.3f})".format(**found)
        )
        return found

    figures: dict[str, Any] = {}
    running = [cost(running=n) for n in (64, 256, 1024)]
    queues = [running[1]] + [cost(running=256, waiting=n) for n in (1_000, 10_000)]
    contexts = [cost(running=256, context=n) for n in (512, 2_048, 8_192)]
    figures["steps"] = [*running, *queues[1:], *contexts]
    figures["exponent_running"] = exponent(running[1], running[2], "running")
    figures["exponent_waiting"] = exponent(queues[1], queues[2], "waiting")
    figures["exponent_context"] = exponent(contexts[0], contexts[2], "context")
    figures["encoding"] = encoding_cost(repeats=args.repeats)
    figures["loop"] = loop_overhead()
    show(f"limits: 0.25 ms at 256 -> {running[1]['total']:.3f}; 0.9 ms at 1024 -> {running[2]['total']:.3f}")
    show(
        "growth exponents: running {exponent_running}, waiting {exponent_waiting}, context {exponent_context}".format(
            **figures
        )
    )
    show(
        "256 running on an executor of 5 ms a step: {engine_ms} ms, bare loop {bare_ms} ms, ratio {ratio}".format(
            **figures["loop"]
        )
    )
    show(
        "encoding of a step of 256, in us: from the output {step}, msgspec alone on the same record {bare}, on a record"
        " for each token {per_token}".format(**figures["encoding"])
    )
    if args.json:
        text = json.dumps(figures, indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
