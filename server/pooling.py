"""Embeddings and scores of one HTTP request: its texts as prompts, all of them run together, and what they cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web

from lmjax.protocol import EngineClient, Pooled
from lmjax.types import ParameterError, PoolingParams, QueueFullError, SamplingParams
from server.errors import bad_request, to_api_error, unavailable
from server.metrics import RequestTimer
from server.note import note
from server.openai.replies import PromptTokensDetails
from server.params import check_names
from server.prepare import check_length
from server.schema import PoolingRequest
from server.state import ServerState, new_id

MAX_TEXTS = 2048
_NOTHING_DRAWN = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class PoolJob:
    ids: list[int]
    split: int = 0  # where the second text of a pair begins


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int = 0


def usage_of(found: Sequence[Pooled]) -> PoolingUsage:
    total = sum(result.num_prompt_tokens for result in found)
    cached = sum(result.num_cached_tokens for result in found)
    return PoolingUsage(total, total, PromptTokensDetails(cached))


def pooling_params(asked: PoolingRequest, dimensions: int | None = None) -> PoolingParams:
    check_names(asked.request_id, asked.cache_salt)
    if not -(2**31) <= asked.priority < 2**31:
        raise bad_request("priority", f"got {asked.priority}, must be a 32-bit integer")
    return PoolingParams(
        dimensions=dimensions,
        use_activation=asked.use_activation,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
    )


def make_job(
    client: EngineClient,
    text: str | list[int],
    params: PoolingParams,
    field: str,
    second: str | None = None,
    add_special_tokens: bool = True,
) -> PoolJob:
    """Raises ``ApiError``; ``field``: what the request calls its texts."""
    try:
        if params.truncate_prompt_tokens is None:
            for part in (text, second):
                if isinstance(part, str):
                    check_length(client, part)
        return PoolJob(*client.pooling_prompt(text, params, second, add_special_tokens))
    except ParameterError as error:
        raise to_api_error(error, {"prompt": field}) from None


async def run_all(
    request: web.Request,
    state: ServerState,
    client: EngineClient,
    jobs: Sequence[PoolJob],
    params: PoolingParams,
    asked: PoolingRequest,
    lora: str | None,
) -> list[Pooled]:
    """Results in the order of the jobs. If one fails or the client goes, the others are aborted.

    ``lora``: the adapter that the request names (``ServerState.lora_of``).
    """
    name = new_id("pool")  # never the client's own id: two live requests may share that one
    timers = [RequestTimer(state.metrics, _NOTHING_DRAWN) for _ in jobs]

    async def run(index: int) -> Pooled:
        job = jobs[index]
        found = await client.pool(
            job.ids,
            params,
            split=job.split,
            request_id=f"{name}-{index}",
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            lora=lora,
        )
        timers[index].pooled(found)
        return found

    note(request).tokens = (sum(len(job.ids) for job in jobs), 0)
    async with _counted(state, timers):
        return list(await _gather([asyncio.ensure_future(run(i)) for i in range(len(jobs))]))


async def _gather(tasks: list[asyncio.Task[Pooled]]) -> list[Pooled]:
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _counted(state: ServerState, timers: list[RequestTimer]) -> AsyncIterator[None]:
    """Keeps the request among the active ones; turns the server's own abort into an error."""
    task = asyncio.current_task()
    assert task is not None
    state.active.add(task)
    unfinished: str | None = "abort"
    try:
        yield
    except asyncio.CancelledError:
        if state.aborting is None:
            raise  # the client has gone
        task.uncancel()
        raise unavailable(state.aborting, "aborted") from None
    except QueueFullError:
        state.metrics.rejected("queue_full")
        unfinished = None
        raise
    except Exception:
        unfinished = "error"
        raise
    finally:
        for timer in timers:
            timer.finish(unfinished)
        state.active.discard(task)


def check_count(field: str, count: int) -> None:
    if not 1 <= count <= MAX_TEXTS:
        raise bad_request(field, f"got {count}, must be 1 to {MAX_TEXTS}")
