"""The LoRA adapters of one engine by name, and how they come and go between two steps.

A name is a number to scheduler and device, and never the same one twice: what was computed with an adapter is never
found by the next of its name. Only files are read in another thread.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from lmjax.types import AdapterError, LoraInfo

if TYPE_CHECKING:
    from lmjax.core.plan import Executor
    from lmjax.engine.engine import Engine


class _Entry(NamedTuple):
    number: int
    path: str
    rank: int


class Reading:
    """An adapter's files being read and checked beside the steps. ``error``: why it failed, once ``done()``."""

    def __init__(self, executor: Executor, path: str):
        self.found: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(executor, path), daemon=True, name="lmjax-adapter")
        self._thread.start()

    def _run(self, executor: Executor, path: str) -> None:
        try:
            self.found = executor.read_adapter(path)
        except Exception as error:
            self.error = error

    def done(self) -> bool:
        return not self._thread.is_alive()


class Loras:
    """``most``: adapters that may be loaded at once. All methods but ``start_reading`` are of the loop's thread."""

    def __init__(self, engine: Engine, most: int):
        self._engine, self._most = engine, most
        self._entries: dict[str, _Entry] = {}
        self._numbers = itertools.count(1)

    def infos(self) -> list[LoraInfo]:
        if not self._entries:
            return []
        there = self._engine.scheduler.adapters_on_device
        return [LoraInfo(name, e.path, e.rank, e.number in there) for name, e in self._entries.items()]

    def number(self, name: str | None) -> int:
        """0 for None, the model itself. Raises ``AdapterError``."""
        if name is None:
            return 0
        if name not in self._entries:
            raise AdapterError(f"lora: there is no adapter {name!r:.300}", unknown=True)
        return self._entries[name].number

    def start_reading(self, name: str, path: str) -> Reading:
        """Raises ``AdapterError`` where it could not be added."""
        self._check_new(name)
        return Reading(self._engine.executor, path)

    def add(self, name: str, path: str, found: Any) -> None:
        """found: what ``Executor.read_adapter`` gave. Requests may name it from now on."""
        self._check_new(name)
        number = next(self._numbers)
        self._engine.executor.add_adapter(number, found)
        self._entries[name] = _Entry(number, path, found.rank)

    def remove(self, name: str) -> None:
        """Requests that are there are answered with it; its memory is free when the last of them has ended."""
        number = self.number(name)
        del self._entries[name]
        self._engine.scheduler.forget_adapter(number)
        self.drop_unused()

    def drop_unused(self) -> None:
        for number in self._engine.scheduler.take_dropped_adapters():
            self._engine.executor.drop_adapter(number)

    def _check_new(self, name: str) -> None:
        if not self._engine.executor.info.max_loras:
            raise AdapterError("lora: the engine was started without --enable-lora")
        if name in self._entries:
            raise AdapterError(f"lora: the name {name!r} is taken by the adapter in {self._entries[name].path}")
        if len(self._entries) >= self._most:
            raise AdapterError(
                f"lora: {self._most} adapters are loaded, and more may not be (--max-cpu-loras): unload one first"
            )
