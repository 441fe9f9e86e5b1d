"""Whole decode steps: against their roofline, with and without command buffers, and what the host takes of them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from benchmarks.gpu_parts.llama import FULL_STEP, SMALL_STEP
from benchmarks.gpu_parts.model import Decoding, cut, model, product_flops, read_bytes
from benchmarks.gpu_parts.session import Session
from lmjax.runtime.jax_executor import JaxExecutor

# one graph of kernels a step against launches one by one
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def step(s: Session) -> dict[str, Any]:
    """8 of the 32 layers at four buckets, then all at one; the bytes that must be read, at the measured copy rate."""
    spec, params = model(s)
    rows, context = s.pick(FULL_STEP, SMALL_STEP)
    cases = s.pick([(8, 1), (8, 64), (32, rows), (8, 16), (8, 256)], [(1, 1), (2, rows)])
    for layers, batch in s.cases(cases, lambda c: f"step of {c[0]} layers, batch {c[1]}"):
        with s.attempt(f"step of {layers} layers, batch {batch}"):
            _step(s, *cut(spec, params, layers), batch, context)
    return {}


def _step(s: Session, spec: Any, params: Any, batch: int, context: int) -> None:
    decoding = Decoding(s, spec, params, batch, context)
    begin = time.perf_counter()
    executable = decoding.compile()
    compile_seconds = time.perf_counter() - begin
    forward = s.seconds(decoding.forward(executable))
    executor = decoding.executor(executable)
    host = _host(decoding, executor, s.pick(50, 2))
    whole = s.seconds(_pipelined(decoding, executor))
    executor.close()
    num_bytes = read_bytes(spec, params, batch, context)
    row: dict[str, Any] = {"layers": len(spec.layers), "batch": batch, "context": context}
    row |= {"step_us": whole * 1e6, "forward_us": forward * 1e6, **host, "compile_s": compile_seconds}
    row |= {"read_gb": num_bytes / 1e9, "tokens_s": batch / whole}
    if "copy" in s.peaks:
        flops = product_flops(spec, params, batch)
        ideal = max(num_bytes / s.peaks["copy"], flops / s.peaks["bfloat16"])
        row |= {"roofline_us": ideal * 1e6, "of_roofline": ideal / whole, "forward_of_roofline": ideal / forward}
    s.add(**row)


def _pipelined(decoding: Decoding, executor: JaxExecutor) -> Any:
    """A call that submits a step and collects the one before it, as the engine's loop does."""
    waiting: list[Any] = []

    def call() -> jax.Array:
        waiting.append(executor.submit(decoding.plan()))
        if len(waiting) == 2:
            executor.collect(waiting.pop(0))
        return waiting[-1].outputs.last

    return call


def _host(decoding: Decoding, executor: JaxExecutor, steps: int) -> dict[str, float]:
    """Microseconds of this process for a step without the device's: it is idle before, and done before the reading."""
    executor.collect(executor.submit(decoding.plan()))
    submits, collects = [], []
    for _ in range(steps):
        plan = decoding.plan()
        begin = time.perf_counter()
        in_flight = executor.submit(plan)
        submits.append(time.perf_counter() - begin)
        in_flight.outputs.last.block_until_ready()
        begin = time.perf_counter()
        executor.collect(in_flight)
        collects.append(time.perf_counter() - begin)
    return {
        "submit_us": statistics.median(submits) * 1e6,
        "collect_us": statistics.median(collects) * 1e6,
    }


def graphs(s: Session) -> dict[str, Any]:
    """The forward program with command buffers and without."""
    spec, params = model(s)
    spec, params = cut(spec, params, s.pick(8, 1))
    for batch in s.cases(s.pick([1, 64], [1]), lambda b: f"command buffers, batch {b}"):
        with s.attempt(f"command buffers, batch {batch}"):
            calls = {}
            for name, options in {"on": None, "off": NO_GRAPHS}.items():
                decoding = Decoding(s, spec, params, batch, s.pick(1024, 40))
                calls[name] = decoding.forward(decoding.compile(options))
            times = s.race(calls)
            s.add(
                batch=batch,
                layers=len(spec.layers),
                on_us=times["on"] * 1e6,
                off_us=times["off"] * 1e6,
                speedup=times["off"] / times["on"],
            )
    return {}
