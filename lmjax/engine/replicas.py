"""Data parallel: several engines behind one ``EngineClient``, each a process with its own devices and KV pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import fields, replace
from typing import Any

from lmjax.config import ConfigError, EngineConfig
from lmjax.engine.async_engine import AsyncEngine
from lmjax.engine.build import DEFAULT_EXECUTOR, Front
from lmjax.engine.lora_names import check_new_lora, find_lora, merged_names
from lmjax.engine.pooling import check_pooling, pooled, prepare
from lmjax.engine.process import one_line
from lmjax.engine.routing import RUNNING_COST, Replica, block_names, by_cost
from lmjax.engine.validate import Checked, check_priority, check_request
from lmjax.protocol import EngineInfo, EngineReport, EngineStats, Pooled
from lmjax.types import (
    AdapterError,
    EngineDeadError,
    LoraInfo,
    ModelError,
    OrderError,
    PoolingParams,
    QueueFullError,
    RequestUpdate,
    SamplingParams,
)

log = logging.getLogger("lmjax.engine")

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds before a dead engine is started anew; doubled each time it fails
MOST_FAILURES = 5  # in a row, while no other engine is alive: then nobody can be served
RETRY_OTHER, RETRY_START = 1, 5  # seconds for clients of an engine that died: another is alive, or none
_GAUGES = (
    "num_running",
    "num_waiting",
    "kv_usage",
    "host_usage",
    "iteration_tokens",
    "running_loras",
    "waiting_loras",
)  # all other statistics are counters


class Replicas:
    """Implements ``lmjax.protocol.EngineClient`` over N ``AsyncEngine``. Made by ``await Replicas.start(config, n)``.

    A request goes to the engine that will have least to do for it. An engine that dies fails its own requests and is
    started anew; the others go on.
    """

    info: EngineInfo
    tokenizer: Any

    def __init__(self, config: EngineConfig, executor: str) -> None:
        self._config, self._executor = config, executor
        self._engines: dict[int, AsyncEngine] = {}  # those that are alive
        self._replicas: dict[int, Replica] = {}
        self._front: Front | None = None
        self._infos: dict[int, EngineInfo] = {}
        self._lost: dict[int, EngineStats] = {}  # counters of engines that have died
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: str | None = None
        self._changing = asyncio.Lock()  # all engines have the same weights, and sleep together
        self._newest: tuple[str, int | str] | None = None  # path and version of what was loaded last
        self.weight_version: int | str = 0
        self.sleep_level = 0
        self.loras: dict[str, LoraInfo] = {}

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        count: int,
        progress: Callable[[str], None] | None = None,
        *,
        executor: str = DEFAULT_EXECUTOR,
    ) -> Replicas:
        """Starts ``count`` engines: one, which fills the compile cache, then the others at once.

        Raises ``ConfigError`` when the settings are at fault, ``ModelError`` when the model's files are, else
        ``EngineDeadError``.
        """
        if config.nnodes > 1:
            raise ConfigError(f"--data-parallel-size: got {count}, must be 1 with --nnodes above 1")
        config.validate()
        self = cls(config, executor)
        _devices_of(count - 1, count, config.num_devices)
        try:
            await self._start_one(0, progress)
            first = self._engines[0]
            self.info, self.tokenizer, self._front = first.info, first.tokenizer, first.front
            self.loras = dict(first.loras)
            self._replicas = {index: Replica(self.info.num_kv_blocks) for index in range(count)}
            async with asyncio.TaskGroup() as group:
                for index in range(1, count):
                    group.create_task(self._start_one(index, progress))
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return self

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        return bool(self._replicas) and self._dead is None and any(e.ready for e in self._engines.values())

    @property
    def dead(self) -> str | None:
        """Set when it is closed, or when no engine is left and none can be started."""
        return self._dead

    @property
    def pids(self) -> dict[int, int | None]:
        """Process ids of the engines that are alive."""
        return {index: engine.pid for index, engine in self._engines.items()}

    def stats(self) -> EngineStats:
        """Sums over the engines; ``kv_usage`` is the mean."""
        reports = self.reports().values()
        total, found = EngineStats(), [report.stats for report in reports]
        for one in found:
            total = _added(total, one)
        alive = max(sum(report.alive for report in reports), 1)
        return replace(
            total,
            num_running=sum(s.num_running for s in found),
            num_waiting=sum(s.num_waiting for s in found),
            kv_usage=sum(s.kv_usage for s in found) / alive,
            host_usage=sum(s.host_usage for s in found) / alive,
            iteration_tokens=[tokens for s in found for tokens in s.iteration_tokens],
            running_loras=merged_names(s.running_loras for s in found),
            waiting_loras=merged_names(s.waiting_loras for s in found),
        )

    def reports(self) -> dict[int, EngineReport]:
        """See ``EngineClient.reports``."""
        found = {}
        for index, info in sorted(self._infos.items()):
            engine = self._engines.get(index)
            now, lost = engine.stats() if engine else EngineStats(), self._lost.get(index, EngineStats())
            gauges = {name: getattr(now, name) for name in _GAUGES}
            found[index] = EngineReport(info, replace(_added(lost, now), **gauges), engine is not None)
        return found

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """See ``EngineClient.validate``."""
        checked = check_request(prompt_token_ids, params, self.info, self.tokenizer)
        return checked.prompt, checked.params

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> AsyncIterator[RequestUpdate]:
        """See ``AsyncEngine.generate``. The engine is chosen when the first update is asked for."""
        check_priority(priority, self._config.scheduling_policy)
        find_lora(lora, self.loras, self.info)
        checked = check_request(prompt_token_ids, params, self.info, self.tokenizer)
        return self._stream(checked, request_id or uuid.uuid4().hex, priority, cache_salt, lora)

    def pooling_prompt(
        self,
        text: str | list[int],
        params: PoolingParams,
        second: str | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], int]:
        """See ``EngineClient.pooling_prompt``."""
        return prepare(self.tokenizer, self.info, text, params, second, add_special_tokens)

    async def pool(
        self,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        split: int = 0,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> Pooled:
        """See ``EngineClient.pool``."""
        check_priority(priority, self._config.scheduling_policy)
        checked = check_pooling(prompt_token_ids, params, self.info, split)
        return await pooled(checked, self._stream(checked, request_id or uuid.uuid4().hex, priority, cache_salt, lora))

    async def load_weights(self, path: str, version: int | str | None = None, kv_cache: str = "keep") -> None:
        """See ``EngineClient.load_weights``: in all engines, one first. Where that fails nothing has changed; another
        that fails after it is started anew, and loads them then."""

        async def change() -> None:
            engines = self._alive()
            index = next(iter(engines))
            first = engines.pop(index)
            await first.load_weights(path, version, kv_cache)
            self.weight_version = given = first.weight_version
            self._newest = path, given
            self._replicas[index].forget()
            await self._on_each(engines, lambda engine: engine.load_weights(path, given, kv_cache))

        await self._change(change())

    async def sleep(self, level: int = 1) -> None:
        async def change() -> None:
            await self._on_each(self._alive(), lambda engine: engine.sleep(level))
            self.sleep_level = max(self.sleep_level, level)

        await self._change(change())

    async def wake_up(self) -> None:
        async def change() -> None:
            await self._on_each(self._alive(), lambda engine: engine.wake_up())
            self.sleep_level = 0

        await self._change(change())

    async def load_lora(self, name: str, path: str) -> None:
        """See ``EngineClient.load_lora``: in all engines or in none. One that dies meanwhile loads it when it is
        started anew."""

        async def change() -> None:
            check_new_lora(name, path, self.loras, self.info)
            engines = self._alive().values()
            results = await asyncio.gather(*(e.load_lora(name, path) for e in engines), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            refused = [error for error in errors if not isinstance(error, EngineDeadError)]
            if refused or len(errors) == len(results):
                having = [engine for engine in engines if name in engine.loras]
                await asyncio.gather(*(engine.unload_lora(name) for engine in having), return_exceptions=True)
                raise (refused or errors)[0]
            self.loras[name] = next(engine.loras[name] for engine in engines if name in engine.loras)

        await self._change(change())

    async def unload_lora(self, name: str) -> None:
        """See ``EngineClient.unload_lora``."""

        async def change() -> None:
            find_lora(name or "", self.loras, self.info)
            del self.loras[name]
            having = [engine for engine in self._engines.values() if name in engine.loras]
            await asyncio.gather(*(engine.unload_lora(name) for engine in having), return_exceptions=True)

        await self._change(change())

    async def _change(self, change: Coroutine[Any, Any, None]) -> None:
        """One at a time, and to its end, also if the caller goes: no engine may be left behind."""

        async def run() -> None:
            async with self._changing:
                await change

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def _alive(self) -> dict[int, AsyncEngine]:
        if not self._engines:
            raise EngineDeadError(self._dead or "no engine is alive; one is being started")
        return dict(self._engines)

    async def _on_each(self, engines: dict[int, AsyncEngine], order: Callable[[AsyncEngine], Awaitable[None]]) -> None:
        """One that fails while another does not is started anew, since it must not differ."""
        results = await asyncio.gather(*map(order, engines.values()), return_exceptions=True)
        failed = {i: error for i, error in zip(engines, results, strict=True) if isinstance(error, Exception)}
        for index in engines:
            self._replicas[index].forget()
        if failed and len(failed) == len(self._engines):
            raise next(iter(failed.values()))
        for index, error in failed.items():
            if self._engines.get(index) is engines[index]:
                self._lose(index, f"differs from the others: {one_line(error)}")

    async def close(self) -> None:
        """Aborts what runs and ends the processes."""
        if self._dead is None:
            self._dead = "the engine is closed"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(e.close() for e in self._engines.values()), return_exceptions=True)

    # --- requests ---------------------------------------------------------------------------------------------

    async def _stream(
        self, checked: Checked, request_id: str, priority: int, cache_salt: str | None, lora: str | None
    ) -> AsyncGenerator[RequestUpdate]:
        names = block_names(checked.prompt, cache_salt, self.info.block_size, lora)
        alive = {i: r for i, r in self._replicas.items() if i in self._engines and self._engines[i].ready}
        if not alive:
            raise EngineDeadError(self._dead or "no engine is alive; one is being started", self._retry_after())
        find_lora(lora, self.loras, self.info)
        if lora is not None:  # one that was started anew may not have been able to load it
            alive = {i: r for i, r in alive.items() if lora in self._engines[i].loras}
            if not alive:
                raise EngineDeadError(f"no engine that is alive has the adapter {lora!r}", self._retry_after())
        order = by_cost(alive, names, len(checked.prompt), self.info.block_size)
        for index, new_tokens in order:
            stream = self._engines[index].stream(checked, request_id, priority, cache_salt, lora)
            try:
                async with contextlib.aclosing(self._counted(index, names, new_tokens, checked, stream)) as updates:
                    async for update in updates:
                        update.engine = index
                        yield update
                return
            except QueueFullError:
                if index == order[-1][0]:
                    raise
            except EngineDeadError as error:
                raise EngineDeadError(str(error), self._retry_after()) from error

    def _retry_after(self) -> int | None:
        if self._dead is not None:
            return None
        return RETRY_OTHER if self.ready else RETRY_START

    async def _counted(
        self, index: int, names: list[bytes], new_tokens: int, checked: Checked, stream: AsyncGenerator[RequestUpdate]
    ) -> AsyncGenerator[RequestUpdate]:
        """``stream``, counted among the work of its replica while it runs."""
        replica, running = self._replicas[index], RUNNING_COST * checked.params.n
        work = new_tokens + running
        replica.work += work
        try:
            async with contextlib.aclosing(stream):
                async for update in stream:
                    if work > running:  # the prompt is computed
                        replica.work -= work - running
                        work = running
                        replica.note(names)
                    yield update
        finally:
            replica.work -= work

    # --- engines ----------------------------------------------------------------------------------------------

    async def _start_one(self, index: int, progress: Callable[[str], None] | None = None) -> None:
        label = f"engine {index}: "

        def tell(line: str) -> None:
            if progress is not None:
                progress(label + line)

        # one that is started anew gets the adapters of the others, not those of the start
        config = self._config.replace(lora_modules={}) if index in self._infos else self._config
        engine = await AsyncEngine.start(
            config,
            tell,
            lambda reason: self._lose(index, reason),
            executor=self._executor,
            front=self._front,
            environment=_devices_of(index, index + 1, self._config.num_devices),
            label=label,
        )
        async with self._changing:
            try:
                await self._catch_up(index, engine)
            except OrderError as error:
                await engine.close()
                raise EngineDeadError(f"the newest weights could not be loaded: {one_line(error)}") from error
            self._engines[index], self._infos[index] = engine, engine.info
        log.info("engine %d is ready", index)

    async def _catch_up(self, index: int, engine: AsyncEngine) -> None:
        """With what the others were told before it was there."""
        if index in self._infos:
            for name, info in self.loras.items():
                try:
                    await engine.load_lora(name, info.path)
                except AdapterError as error:  # its files went; others may still have it
                    log.error("engine %d is without the adapter %s: %s", index, name, one_line(error))
        if self._newest is not None:
            await engine.load_weights(*self._newest)
        if self.sleep_level:
            await engine.sleep(self.sleep_level)
        if engine.dead:
            raise EngineDeadError(engine.dead)

    def _lose(self, index: int, reason: str) -> None:
        engine = self._engines.pop(index, None)
        if engine is None:  # it was not there yet: whoever starts it finds out
            return
        log.error("engine %d: %s; it is started anew", index, reason)
        self._lost[index] = _added(self._lost.get(index, EngineStats()), engine.stats())
        task = asyncio.get_running_loop().create_task(self._restart(index, engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, index: int, engine: AsyncEngine) -> None:
        await engine.close()
        self._replicas[index].forget()
        delay, failures = FIRST_DELAY, 0
        while True:
            await asyncio.sleep(delay)
            try:
                await self._start_one(index)
                return
            except (ConfigError, ModelError, EngineDeadError) as error:
                failures, delay = failures + 1, min(2 * delay, LONGEST_DELAY)
                log.error("engine %d could not be started: %s; next try in %g s", index, one_line(error), delay)
                if failures >= MOST_FAILURES and not self._engines:
                    self._dead = f"no engine is alive and none can be started: {one_line(error)}"
                    return


def _added(a: EngineStats, b: EngineStats) -> EngineStats:
    """The counters of both."""
    names = [f.name for f in fields(EngineStats) if f.name not in _GAUGES]
    return EngineStats(**{name: getattr(a, name) + getattr(b, name) for name in names})


def _devices_of(index: int, count: int, each: int) -> dict[str, str]:
    """The environment that gives an engine its own cards: it counts them from 0. Raises ``ConfigError``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count * each)] if visible is None else [n for n in visible.split(",") if n]
    if visible and len(names) < count * each:
        raise ConfigError(
            f"--data-parallel-size: {count} engines of {each} devices need {count * each}, "
            f"CUDA_VISIBLE_DEVICES names {len(names)}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index * each : (index + 1) * each])} if names else {}
