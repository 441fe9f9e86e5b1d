"""Weights that change, and memory that is given back, while an engine has requests: what happens between two steps.

Everything here runs in the loop's thread; only files are read in another, so requests go on while weights load.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lmjax.engine.records import ControlReply, LoadLora, LoadWeights, Sleep, UnloadLora, WakeUp
from lmjax.types import OrderError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmjax.engine.engine import Engine

log = logging.getLogger("lmjax.engine")

KV_POLICIES = ("keep", "recompute")
LEVELS = (1, 2)
MAX_VERSION_CHARS = 256
Version = int | str
Order = LoadWeights | Sleep | WakeUp | LoadLora | UnloadLora


def check_version(version: Any) -> None:
    """None is the next one. Raises ``ParameterError``."""
    fine = isinstance(version, Integral) and not isinstance(version, bool) and abs(int(version)) < 2**63
    fine |= isinstance(version, str) and 0 < len(version) <= MAX_VERSION_CHARS
    if version is not None and not fine:
        raise ParameterError(
            "version", f"got {version!r:.300}, must be an integer or a text of 1 to {MAX_VERSION_CHARS} characters"
        )


def check_kv_cache(policy: Any) -> None:
    if policy not in KV_POLICIES:
        raise ParameterError("kv_cache", f"got {policy!r}, must be one of {', '.join(KV_POLICIES)}")


def check_level(level: Any) -> None:
    if level not in LEVELS or not isinstance(level, int) or isinstance(level, bool):
        raise ParameterError("level", f"got {level!r}, must be 1 (the KV pool is freed) or 2 (weights, too)")


@dataclass(slots=True)
class _Job:
    order: Order
    began: float = field(default_factory=time.monotonic)
    loading: Any = None  # runtime.live.Loading, or engine.loras.Reading


class Live:
    """Of one engine. ``version``: of the weights that the next step runs with. ``level``: 0 while it is awake.

    Orders that come over the channel are carried out one after the other by ``poll``, and answered with ``reply``.
    """

    def __init__(self, engine: Engine, reply: Callable[[ControlReply], None]):
        self._engine, self._reply = engine, reply
        self.version: Version = 0
        self.level = 0
        self._jobs: deque[_Job] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    # at once

    def next_version(self, given: Version | None) -> Version:
        """Raises ``ParameterError`` where nothing follows by itself."""
        check_version(given)
        if given is not None:
            return given if isinstance(given, str) else int(given)
        if isinstance(self.version, str):
            raise ParameterError("version", f"is missing; no number follows the present one, {self.version!r}")
        return self.version + 1

    def set_params(self, params: Any, version: Version | None, kv_cache: str) -> Version:
        """The steps submitted from now on run with ``params`` (what ``executor.check_params`` takes, or what it has
        loaded). Returns their version."""
        check_kv_cache(kv_cache)
        version = self.next_version(version)
        self._engine.flush()
        self._engine.executor.set_params(params)
        self._engine.scheduler.new_weights(recompute=kv_cache == "recompute")
        self.version = version
        return version

    def sleep(self, level: int) -> None:
        """Frees the KV pool; level 2: weights and host tier, too. From level 1 it may go to 2. What runs waits."""
        check_level(level)
        if level <= self.level:
            return
        if not self.level:
            self._engine.drain()
            self._engine.scheduler.give_up_kv()
        self.level = level
        self._engine.executor.sleep(level)

    def wake(self, params: Any = None, version: Version | None = None) -> None:
        """params: as for ``set_params``; None: those that are there."""
        if not self.level:
            if params is not None:
                raise ParameterError("params", "are for an engine that sleeps; this one is awake: set_params() does it")
            return
        if params is not None:
            self.set_params(params, version, "recompute")
        if not self._engine.executor.has_params:
            raise ParameterError("params", "are missing: the weights were freed (sleep level 2)")
        self._engine.executor.wake()
        self.level = 0

    # over the channel

    def order(self, order: Order) -> None:
        self._jobs.append(_Job(order))

    def poll(self) -> None:
        """Does what can be done now. A failure of an order leaves everything as it was, and is told."""
        while self._jobs:
            job = self._jobs[0]
            try:
                if not self._advance(job):
                    return
                error, internal = None, False
            except (ValueError, OSError) as failure:  # weights', models' and settings' errors are ValueErrors
                error, internal = str(failure), isinstance(failure, OrderError) and failure.internal
                log.warning("%s was not done: %s", type(job.order).__name__, error)
            self._jobs.popleft()
            seconds, loras = time.monotonic() - job.began, self._engine.loras.infos()
            self._reply(ControlReply(job.order.id, self.version, self.level, seconds, error, internal, loras))

    def _advance(self, job: _Job) -> bool:
        """True: it is done."""
        match job.order:
            case Sleep(level=level):
                self.sleep(level)
                return True
            case LoadWeights(path=path, version=version, kv_cache=kv_cache):
                check_kv_cache(kv_cache)
                self.next_version(version)
                if not self._loaded(job, path):
                    return False
                self.set_params(job.loading, version, kv_cache)
                return True
            case WakeUp():
                if self.level == 2 and not self._engine.executor.has_params:
                    if not self._loaded(job, None):
                        return False
                    self._engine.executor.set_params(job.loading)
                self.wake()
                return True
            case LoadLora(name=name, path=path):
                loras = self._engine.loras
                if job.loading is None:
                    job.loading = loras.start_reading(name, path)
                if not job.loading.done():
                    return False
                raise_failure(job.loading)
                loras.add(name, path, job.loading.found)
                return True
            case UnloadLora(name=name):
                self._engine.loras.remove(name)
                return True

    def _loaded(self, job: _Job, path: str | None) -> bool:
        if job.loading is None:
            job.loading = self._engine.executor.start_loading(path)
        if not job.loading.done():
            return False
        raise_failure(job.loading)
        return True


def raise_failure(loading: Any) -> None:
    """What went wrong: settings' and files' errors as they are, anything else by its name."""
    error = loading.error
    if error is None:
        return
    if isinstance(error, ValueError | OSError):
        raise error
    raise OrderError(f"{type(error).__name__}: {error}", internal=True) from error
