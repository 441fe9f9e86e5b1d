"""One HTTP request on the engine: all its prompts, their updates merged into one stream, closed together."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

from lmjax.protocol import EngineClient
from lmjax.types import EngineDeadError, RequestUpdate
from server.errors import ApiError
from server.metrics import RequestTimer, ServerMetrics
from server.prepare import Job

Batch = list[tuple[int, RequestUpdate]]  # (prompt index, update)


class Generation:
    """Iterate ``batches()``; always ``await close()`` at the end, which aborts what still runs.

    ``lora``: the adapter that the request names (``ServerState.lora_of``). Tokens are counted here, for usage and the
    access log (none generated with ``prompt_only``).
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: ServerMetrics,
        jobs: list[Job],
        *,
        lora: str | None,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt_only: bool = False,
    ):
        name = uuid.uuid4().hex  # never the client's own id: two live requests may share that one
        self._prompt_only = prompt_only
        self._iterators: list[AsyncIterator[RequestUpdate]] = [
            client.generate(
                job.ids, job.params, request_id=f"{name}-{i}", priority=priority, cache_salt=cache_salt, lora=lora
            )
            for i, job in enumerate(jobs)
        ]
        self._timers = [RequestTimer(metrics, job.params) for job in jobs]
        self._pending: dict[asyncio.Task[RequestUpdate | None], int] = {}
        self._started = False
        self.unfinished: str | None = "abort"  # see RequestTimer.finish
        self.prompt_tokens = sum(len(job.ids) for job in jobs)
        self.completion_tokens = 0
        self._cached = [0] * len(jobs)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    async def start(self, patience: float) -> None:
        """Queues the prompts. Waits up to ``patience`` seconds for a first update, so that a request which the
        engine refuses at once is answered with a status instead of a broken stream."""
        self._begin()
        done, _ = await asyncio.wait(self._pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception()
            if error is not None:
                raise error
            update = task.result()
            if update is not None and update.error is not None:
                raise await self._failure(self._pending.pop(task), update.error)

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self._pending = {asyncio.ensure_future(_next(it)): i for i, it in enumerate(self._iterators)}

    async def batches(self) -> AsyncIterator[Batch]:
        """Raises what the engine raises, and ``ApiError`` for a request that the engine ended with an error."""
        self._begin()
        while self._pending:
            if len(self._iterators) == 1:
                task, _ = self._pending.popitem()
                update = await task
                if update is None:
                    return
                yield await self._take([(0, update)])
                async for update in self._iterators[0]:
                    yield await self._take([(0, update)])
                return
            done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
            batch: Batch = []
            for task in done:
                index = self._pending.pop(task)
                update = task.result()
                if update is not None:
                    batch.append((index, update))
                    self._pending[asyncio.ensure_future(_next(self._iterators[index]))] = index
            if batch:
                batch.sort(key=lambda item: item[0])
                yield await self._take(batch)

    async def _take(self, batch: Batch) -> Batch:
        for index, update in batch:
            self._timers[index].update(update)
            if update.error is not None:
                raise await self._failure(index, update.error)
            self._cached[index] = update.num_cached_tokens
            if not self._prompt_only:
                self.completion_tokens += sum(len(delta.token_ids) for delta in update.deltas)
        return batch

    async def _failure(self, index: int, message: str) -> Exception:
        """Whether its engine is dead or only this request failed: the iterator's next step tells."""
        following = next((task for task, prompt in self._pending.items() if prompt == index), None)
        try:
            await (following or _next(self._iterators[index]))
        except EngineDeadError as error:
            return error
        return ApiError(500, f"the engine ended the request: {message}", code="engine_error")

    async def close(self) -> None:
        for task in self._pending:
            task.cancel()
        if self._pending:
            await asyncio.gather(*self._pending, return_exceptions=True)
        for iterator in self._iterators:
            aclose = getattr(iterator, "aclose", None)
            if aclose is not None:
                await aclose()
        for timer in self._timers:
            timer.finish(self.unfinished)


async def _next(iterator: AsyncIterator[Any]) -> Any:
    try:
        return await anext(iterator)
    except StopAsyncIteration:
        return None
