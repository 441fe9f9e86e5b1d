"""``AsyncEngine``: the engine's process for asyncio. One reader of the channel, one wake-up a request a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from lmjax.config import ConfigError, EngineConfig
from lmjax.engine.build import DEFAULT_EXECUTOR, Front, check_first_rank, load_front
from lmjax.engine.columns import add_request
from lmjax.engine.live import Order, check_kv_cache, check_version
from lmjax.engine.lora_names import check_new_lora, find_lora, in_use
from lmjax.engine.output import OutputProcessor, RequestState
from lmjax.engine.pooling import check_pooling, pooled, prepare
from lmjax.engine.process import EngineProcess, one_line
from lmjax.engine.records import (
    AbortRequest,
    ControlReply,
    Dead,
    LoadLora,
    LoadWeights,
    Progress,
    Ready,
    Shutdown,
    Sleep,
    StepRecord,
    UnloadLora,
    WakeUp,
)
from lmjax.engine.validate import Checked, check_priority, check_request
from lmjax.protocol import EngineInfo, EngineReport, EngineStats, Pooled
from lmjax.types import (
    AdapterError,
    EngineDeadError,
    LoraInfo,
    ModelError,
    OrderError,
    PoolingParams,
    RequestUpdate,
    SamplingParams,
)

log = logging.getLogger("lmjax.engine")

_MESSAGES_A_TURN = 16  # then the event loop's other tasks have their turn
_MOST_ITERATIONS = 65536  # of EngineStats.iteration_tokens, if nobody asks for the stats
_LAST_WORDS = 0.2  # seconds to wait for a dead process's last message


class AsyncEngine:
    """Implements ``lmjax.protocol.EngineClient``. Made by ``await AsyncEngine.start(config)``; ``async with``-able.

    It belongs to the event loop in which it was started.
    """

    info: EngineInfo
    tokenizer: Any
    front: Front | None = None

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._process: EngineProcess | None = None
        self._outputs: OutputProcessor | None = None
        self._started: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._stats = EngineStats()
        self._dead: str | None = None
        self._policy, self._label = "fcfs", ""
        self._progress: Callable[[str], None] | None = None
        self._on_dead: Callable[[str], None] | None = None
        self._orders: dict[int, tuple[Order, asyncio.Future[ControlReply]]] = {}  # that wait for their reply
        self._next_order = 0
        self._with_lora: dict[int, tuple[str, RequestState]] = {}  # open requests that name an adapter, by handle
        self.weight_version: int | str = 0
        self.sleep_level = 0
        self.loras: dict[str, LoraInfo] = {}

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        on_dead: Callable[[str], None] | None = None,
        *,
        executor: str = DEFAULT_EXECUTOR,
        front: Front | None = None,
        environment: dict[str, str] | None = None,
        label: str = "",
    ) -> AsyncEngine:
        """Starts the process and waits until every program is compiled.

        ``progress(line)`` says what is being done. ``on_dead(reason)`` is called once if the engine dies later.
        ``executor``: "module:function" that builds the executor from the config, in the engine's process.
        ``front``: that of another engine of the same model; ``environment``: variables for the process;
        ``label``: begins the lines of its log.
        Raises ``ConfigError`` when the settings are at fault, ``ModelError`` when the model's files are, else
        ``EngineDeadError``.
        """
        self = cls()
        self._progress, self._on_dead, self._label = progress, on_dead, label
        self._policy = config.validate().scheduling_policy
        check_first_rank(config)
        try:
            # first: a model that is not there costs no process, and a download or unpacking is done only once
            front = front if front is not None else await asyncio.to_thread(_load_front, config)
            self.front, self.tokenizer = front, front.tokenizer
            self._process = EngineProcess(config, executor, self._exited, environment, label)
            self._loop.add_reader(self._process.fileno(), self._read)
            self._read()
            self.info = front.complete(await self._started)
        except BaseException:
            await self._stop(grace=0.0)
            raise
        self._outputs = OutputProcessor(self.tokenizer, self.info.eos_token_ids)
        return self

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        return self._outputs is not None and self._dead is None

    @property
    def dead(self) -> str | None:
        return self._dead

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid if self._process else None

    def stats(self) -> EngineStats:
        """The latest snapshot; ``iteration_tokens`` has the steps since the last call."""
        stats, self._stats = self._stats, replace(self._stats, iteration_tokens=[])
        stats.running_loras, stats.waiting_loras = in_use(self._with_lora.values())
        return stats

    def reports(self) -> dict[int, EngineReport]:
        """See ``EngineClient.reports``."""
        return {0: EngineReport(self.info, self.stats(), self.ready)}

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
        """Yields what is new. Closing the iterator, or cancelling its reader, aborts the request.

        Raises ``ParameterError`` and ``AdapterError`` at the call. The iterator raises ``QueueFullError``,
        ``AdapterError`` where the adapter went meanwhile, and ``EngineDeadError`` after an update that has ``error``
        set. The request is queued when its first update is asked for.
        """
        check_priority(priority, self._policy)
        find_lora(lora, self.loras, self.info)
        checked = check_request(prompt_token_ids, params, self.info, self.tokenizer)
        return self.stream(checked, request_id or uuid.uuid4().hex, priority, cache_salt, lora)

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
        check_priority(priority, self._policy)
        checked = check_pooling(prompt_token_ids, params, self.info, split)
        return await pooled(checked, self.stream(checked, request_id or uuid.uuid4().hex, priority, cache_salt, lora))

    async def load_weights(self, path: str, version: int | str | None = None, kv_cache: str = "keep") -> None:
        """See ``EngineClient.load_weights``. Orders are carried out one after the other."""
        check_version(version)  # what cannot be sent
        check_kv_cache(kv_cache)
        await self._order(lambda id: LoadWeights(id, path, version, kv_cache))

    async def sleep(self, level: int = 1) -> None:
        await self._order(lambda id: Sleep(id, level))

    async def wake_up(self) -> None:
        await self._order(WakeUp)

    async def load_lora(self, name: str, path: str) -> None:
        """See ``EngineClient.load_lora``."""
        check_new_lora(name, path, self.loras, self.info)
        await self._order_lora(lambda id: LoadLora(id, name, path))

    async def unload_lora(self, name: str) -> None:
        """See ``EngineClient.unload_lora``."""
        find_lora(name or "", self.loras, self.info)
        del self.loras[name]  # messages keep their order: what was sent before is answered, nothing is sent after
        await self._order_lora(lambda id: UnloadLora(id, name))

    async def _order_lora(self, make: Callable[[int], LoadLora | UnloadLora]) -> None:
        try:
            await self._order(make)
        except OrderError as error:
            if error.internal:
                raise
            raise AdapterError(str(error)) from None

    async def _order(self, make: Callable[[int], Order]) -> None:
        if self._dead is not None or self._process is None:
            raise EngineDeadError(self._dead or "the engine has not started")
        self._next_order += 1
        order = make(self._next_order)
        waiter: asyncio.Future[ControlReply] = self._loop.create_future()
        self._orders[order.id] = order, waiter
        self._process.send(order)
        reply = await waiter
        if reply.error is not None:
            raise OrderError(reply.error, reply.internal)

    def _replied(self, reply: ControlReply) -> None:
        self.weight_version, self.sleep_level = reply.version, reply.level
        order, waiter = self._orders.pop(reply.id)
        if isinstance(order, LoadLora) and reply.error is None:  # others may have been told to go since, and have not
            self.loras |= {info.name: info for info in reply.loras if info.name == order.name}
        if not waiter.done():  # who asked may have gone
            waiter.set_result(reply)

    async def close(self) -> None:
        """Aborts what runs and ends the process."""
        await self._stop(grace=5.0)

    # --- requests ---------------------------------------------------------------------------------------------

    async def stream(
        self, checked: Checked, request_id: str, priority: int, cache_salt: str | None, lora: str | None
    ) -> AsyncGenerator[RequestUpdate]:
        """``generate`` of what was checked already."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        request = self._add(checked, request_id, priority, cache_salt, lora)
        try:
            while True:
                update = request.take()
                if update is not None:
                    yield update
                elif request.error is not None:
                    raise request.error
                elif request.finished:
                    return
                else:
                    request.waiter = self._loop.create_future()
                    await request.waiter
        finally:
            self._close_request(request)

    def _add(
        self, checked: Checked, request_id: str, priority: int, cache_salt: str | None, lora: str | None
    ) -> RequestState:
        assert self._outputs is not None and self._process is not None
        find_lora(lora, self.loras, self.info)
        now = time.monotonic()
        request = self._outputs.open(request_id, checked.prompt, checked.params, now, checked.sink)
        if lora is not None:
            self._with_lora[request.handle] = lora, request
        self._process.send(add_request(request.handle, checked, now, priority, cache_salt, lora))
        return request

    def _close_request(self, request: RequestState) -> None:
        assert self._outputs is not None
        self._with_lora.pop(request.handle, None)
        self._abort(self._outputs.close(request))

    def _abort(self, handles: list[int]) -> None:
        if handles and self._dead is None and self._process is not None:
            self._process.send(AbortRequest(handles))

    # --- the channel ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """zmq's descriptor signals changes only, so read until nothing is left, or come back by ourselves."""
        if self._process is None or self._process.released:
            return
        try:
            for _ in range(_MESSAGES_A_TURN):
                message = self._process.receive()
                if message is None:
                    return
                self._handle(message)
        except Exception as error:  # nobody would come back for the rest, and every stream would hang
            log.exception("the engine's messages can't be read")
            self._die(f"the front end failed: {type(error).__name__}: {one_line(error)}", EngineDeadError)
            return
        self._loop.call_soon(self._read)

    def _handle(self, message: Any) -> None:
        match message:
            case StepRecord():
                self._publish(message)
            case ControlReply():
                self._replied(message)
            case Progress():
                log.info("%s%s", self._label, message.message)
                if self._progress is not None:
                    self._progress(message.message)
            case Ready():
                self.loras = {info.name: info for info in message.loras}
                if not self._started.done():
                    self._started.set_result(message.info)
            case Dead():
                kind = ModelError if message.model else ConfigError if message.config else EngineDeadError
                self._die(message.message, kind)

    def _publish(self, record: StepRecord) -> None:
        if record.stats is not None:
            iterations = self._stats.iteration_tokens + record.stats.iteration_tokens
            record.stats.iteration_tokens = iterations[-_MOST_ITERATIONS:]
            self._stats = record.stats
        if self._outputs is not None:
            touched, aborts = self._outputs.process(record)
            self._abort(aborts)
            _wake(touched)

    def _exited(self, code: int) -> None:
        """From the watching thread. The event loop may be closed already."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._after_exit, code, time.monotonic() + _LAST_WORDS)

    def _after_exit(self, code: int, deadline: float) -> None:
        self._read()
        if self._dead is not None:
            return
        if time.monotonic() < deadline:
            self._loop.call_later(0.02, self._after_exit, code, deadline)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        assert self._process is not None
        self._die(self._process.verdict or f"{self._process.name} {how}", EngineDeadError)

    def _die(self, reason: str, kind: type[Exception]) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        if not self._started.done():
            self._started.set_exception(kind(reason))
            return
        log.error("%s%s", self._label, reason)
        if self._outputs is not None:
            _wake(self._outputs.fail_all(reason))
        self._fail_orders(reason)
        if self._on_dead is not None:
            self._on_dead(reason)

    def _fail_orders(self, reason: str) -> None:
        orders, self._orders = self._orders, {}
        for _, waiter in orders.values():
            if not waiter.done():
                waiter.set_exception(EngineDeadError(reason))

    async def _stop(self, grace: float) -> None:
        process, self._on_dead = self._process, None
        if self._dead is None:
            self._dead = "the engine is closed"
        if self._outputs is not None:
            _wake(self._outputs.fail_all(self._dead))
        self._fail_orders(self._dead)
        if not self._started.done():
            self._started.cancel()
        if process is not None and not process.released:
            self._loop.remove_reader(process.fileno())
            # shielded: a cancelled start must still leave no process behind
            await asyncio.shield(asyncio.ensure_future(_end(process, grace)))


async def _end(process: EngineProcess, grace: float) -> None:
    if grace:
        process.send(Shutdown())
    await asyncio.to_thread(process.end, grace)
    process.release()


def _wake(requests: list[RequestState]) -> None:
    for request in requests:
        waiter = request.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _load_front(config: EngineConfig) -> Front:
    try:
        return load_front(config)
    except ModelError:
        raise
    except ValueError as error:
        raise ConfigError(one_line(error)) from error
