"""Running one generation request to its end: streamed or whole, with every way in which it may end early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from aiohttp import web

from lmjax.types import QueueFullError, RequestUpdate
from server.errors import ApiError, to_api_error, unavailable
from server.generation import Generation
from server.note import note
from server.openai.replies import Usage, usage
from server.sse import EventStream, ReaderGone
from server.state import ServerState

FIRST_UPDATE_PATIENCE = 1.0  # seconds to wait before a stream's headers are sent
Handle = Callable[[int, RequestUpdate], None]


def total_usage(generation: Generation) -> Usage:
    return usage(generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens)


async def stream(
    request: web.Request,
    state: ServerState,
    generation: Generation,
    events: EventStream,
    render: Handle,
    include_usage: bool,
) -> web.StreamResponse:
    """``render(prompt index, update)`` adds chunks to ``events``. Errors before the first byte are raised."""
    stall = state.settings.stall_timeout
    try:
        async with running(request, state, generation):
            await generation.start(FIRST_UPDATE_PATIENCE)
            await events.open()
            async with aclosing(generation.batches()) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    for index, update in batch:
                        render(index, update)
                    await events.flush(stall)
            if include_usage:
                events.add_usage(total_usage(generation))
            await events.finish(stall)
    except ReaderGone:
        note(request).gone = True
    except Exception as exc:
        if not events.opened:
            raise
        await _fail(request, events, to_api_error(exc), stall)
    return events.response


async def _fail(request: web.Request, events: EventStream, error: ApiError, stall: float) -> None:
    note(request).error = error.code
    try:
        await events.fail(error, min(stall, 5.0))
    except ReaderGone:
        note(request).gone = True


async def collect(request: web.Request, state: ServerState, generation: Generation, take: Handle) -> None:
    """All updates to ``take``; raises what went wrong."""
    async with running(request, state, generation), aclosing(generation.batches()) as batches:  # type: ignore[type-var]
        async for batch in batches:
            for index, update in batch:
                take(index, update)


@asynccontextmanager
async def running(request: web.Request, state: ServerState, generation: Generation) -> AsyncIterator[None]:
    """Keeps the request among the active ones; closes the generation; turns the server's own abort into an error."""
    task = asyncio.current_task()
    assert task is not None
    state.active.add(task)
    try:
        yield
    except asyncio.CancelledError:
        if state.aborting is None:
            raise  # the client has gone
        task.uncancel()
        raise unavailable(state.aborting, "aborted") from None
    except QueueFullError:
        state.metrics.rejected("queue_full")
        generation.unfinished = None
        raise
    except Exception as exc:
        if not isinstance(exc, ReaderGone):
            generation.unfinished = "error"
        raise
    finally:
        note(request).tokens = (generation.prompt_tokens, generation.completion_tokens)
        await generation.close()
        state.active.discard(task)
