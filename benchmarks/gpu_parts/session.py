"""What a section is given: the card, the sizes to run at, a clock, and where its rows go."""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platform import Target, device_target

ROOT = Path(__file__).resolve().parent.parent.parent
Row = dict[str, Any]
Call = Callable[[], Any]


@dataclass
class Session:
    """``small``: tiny shapes and single runs, for a CPU. ``peaks``: rates of this card in bytes and FLOP per second."""

    target: Target
    small: bool
    memory: int  # bytes that may be allocated at once
    peaks: dict[str, float]
    deadline: float = 0.0
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    emit: Callable[[dict[str, Any]], None] = lambda message: None  # rows at once: the process may crash

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.emit({"row": row})
        print("  " + "  ".join(f"{k}={show(v)}" for k, v in row.items()), file=sys.stderr, flush=True)

    def left(self) -> float:
        """Seconds of the section's share."""
        return self.deadline - time.monotonic()

    def cases(self, cases: list[Any], name: Callable[[Any], str]) -> Iterator[Any]:
        """The cases in turn; those that time does not suffice for (at the pace so far) are listed as skipped."""
        slowest = 0.0
        for case in cases:
            if self.left() < slowest:
                self.skipped.append(f"{name(case)}: no time left")
                continue
            begin = time.monotonic()
            yield case
            slowest = max(slowest, time.monotonic() - begin)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """One case's error is recorded and does not end the section."""
        self.emit({"at": name})
        try:
            yield
        except Exception as error:
            self.failed.append(f"{name}: {where(error)}")
            print(f"  {self.failed[-1]}", file=sys.stderr, flush=True)

    def build(self, lowered: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Executables by the same names, compiled side by side; what does not compile is recorded and left out."""
        if self.target.interpret:
            options = None
        done = {}
        with ThreadPoolExecutor(self.threads) as pool:
            futures = {name: pool.submit(x.compile, compiler_options=options) for name, x in lowered.items()}
            for name, future in futures.items():
                with self.attempt(name):
                    done[name] = future.result()
        return done

    @property
    def threads(self) -> int:
        return max(1, min(8, (os.cpu_count() or 2) // 2))

    def pick(self, full: Any, small: Any) -> Any:
        return small if self.small else full

    def seconds(self, call: Call) -> float:
        return self.race({"it": call})["it"]

    def race(self, calls: dict[str, Call]) -> dict[str, float]:
        """Median seconds of a call. Each turn issues a batch of calls of one kind back to back and waits for the last,
        A B C A B C ..., so that clocks and temperatures are alike for all."""
        batches = {}
        for name, call in calls.items():
            jax.block_until_ready(call())  # warm: memory, command buffers
            begin = time.perf_counter()
            jax.block_until_ready(call())
            once = time.perf_counter() - begin
            batches[name] = 1 if self.small else max(1, min(200, int(0.04 / max(once, 1e-6))))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(2 if self.small else 7):
            for name, call in calls.items():
                begin = time.perf_counter()
                for _ in range(batches[name]):
                    out = call()
                jax.block_until_ready(out)
                times[name].append((time.perf_counter() - begin) / batches[name])
        return {name: statistics.median(values) for name, values in times.items()}


def open_session(options: dict[str, Any], peaks: dict[str, float]) -> Session:
    """options: ``interpret``, ``small``. RuntimeError where there is no card to run on."""
    device = jax.devices()[0]
    if options["interpret"]:
        target = Target("cuda", (9, 0), 132, interpret=True)
    else:
        target = device_target(device)
        if not target.runs_pallas:
            raise RuntimeError(f"no NVIDIA card of capability 8.0 or above, but {device.device_kind}: see --interpret")
    limit = (device.memory_stats() or {}).get("bytes_limit", 2**30)
    return Session(target, options["small"], int(limit * 0.8), dict(peaks))


def lower(function: Callable[..., Any], *args: Any) -> Any:
    """For these arguments (arrays or shapes). What it was traced from may change afterwards."""
    return jax.jit(function, keep_unused=True).lower(*args)


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    return lower(function, *args).compile()


def bind(executable: Any, *args: Any) -> Call:
    return lambda: executable(*args)


def randoms(shape: tuple[int, ...], dtype: Any, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Values on the device, made there: uniform with deviation ``scale``, or any that an integer type has."""
    return _randoms(jax.random.key(seed, impl="rbg"), shape, jnp.dtype(dtype), scale)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _randoms(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jax.random.randint(key, shape, info.min, info.max, jnp.int32).astype(dtype)
    width = dtype if dtype.itemsize == 2 else jnp.dtype("float32")
    values = jax.random.uniform(key, shape, width, -(3**0.5), 3**0.5)
    return (values * jnp.asarray(scale, width)).astype(dtype)


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def where(error: BaseException) -> str:
    """The error in a line, with the place in this repository that it came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if str(ROOT) in f.filename] or frames
    at = f"{Path(own[-1].filename).name}:{own[-1].lineno} " if own else ""
    text = str(error).strip().splitlines() or [""]
    return f"{at}{type(error).__name__}: {text[0][:300]}"


def show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
