"""Ahead-of-time compilation of all programs, and the alarm for any compile after that."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

log = logging.getLogger(__name__)

NUM_THREADS = 2  # tracing holds the GIL and XLA uses threads of its own: more do not help
FEW = 8  # programs: each is told
# one per program that XLA compiles or the persistent cache loads: eager operations too, when they are new
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileAfterReadyError(RuntimeError):
    """Something was compiled while serving, and ``--require-warm`` forbids it."""


@dataclass(frozen=True)
class Program:
    """A function with the abstract arguments it is compiled for. ``donate``: positions of arguments it consumes.
    ``options``: XLA's that it is always compiled with, by name."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def compile(self, options: dict[str, Any] | None = None) -> Any:
        """For the devices that the arguments are placed on. options: more of XLA's, by name."""
        # without this, XLA keeps unused arguments' buffers out of the call and their donation with them
        jitted = jax.jit(self.function, donate_argnums=self.donate, keep_unused=True)
        with self._traced_for():
            lowered = jitted.lower(*self.arguments)
        return lowered.compile(compiler_options={**dict(self.options), **(options or {})} or None)

    def _traced_for(self) -> Any:
        """From jax 0.11 the abstract mesh tells Pallas which card a kernel is lowered for."""
        for leaf in jax.tree.leaves(self.arguments):
            if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
                return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)
        return contextlib.nullcontext()


def compile_all(
    programs: dict[Hashable, Program],
    progress: Callable[[str], None] | None,
    finished: Callable[[Hashable, Any], None] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[Hashable, Any]:
    """Compiles all programs, the slowest (given first) first. Returns the executables by the same keys.

    progress is told about once a second, and at the end; of a few programs, after each. finished gets each executable
    as it is done. options: XLA's, by name.
    """
    begin = told = time.monotonic()
    done: dict[Hashable, Any] = {}
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="compile") as pool:
        futures = {pool.submit(program.compile, options): key for key, program in programs.items()}
        for future in as_completed(futures):
            key = futures[future]
            try:
                done[key] = future.result()
                if finished:
                    finished(key, done[key])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            now = time.monotonic()
            if progress and (now - told >= 1.0 or len(done) == len(programs) or len(programs) <= FEW):
                progress(f"compiling programs: {len(done)}/{len(programs)} ({programs[key].name})")
                told = now
    log.info("compiled %d programs in %.1f s", len(done), time.monotonic() - begin)
    return done


class CompileMonitor:
    """Counts compiles that happen inside ``with monitor.watch():``, in that thread.

    JAX's events are global, so what a user's own program compiles beside the engine is told apart by the thread.
    """

    def __init__(self, require_warm: bool = False):
        self.count = 0
        self._require_warm = require_warm

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Raises ``CompileAfterReadyError`` at the end of the block where ``require_warm`` was given."""
        before, outer = self.count, getattr(_watching, "monitor", None)
        _watching.monitor = self
        try:
            yield
        finally:
            _watching.monitor = outer
        if self._require_warm and self.count > before:
            raise CompileAfterReadyError("a program was compiled after the engine was ready (--require-warm)")

    def _compiled(self, name: str, seconds: float) -> None:
        self.count += 1
        log.error("compiled %s (%.2f s) after the engine was ready: please report this", name, seconds)


_watching = threading.local()


def _on_duration(event: str, duration_secs: float, **metadata: str | int) -> None:
    monitor = getattr(_watching, "monitor", None)
    if monitor is not None and event == COMPILE_EVENT:
        monitor._compiled(str(metadata.get("fun_name", "a program")), duration_secs)


jax.monitoring.register_event_duration_secs_listener(_on_duration)
