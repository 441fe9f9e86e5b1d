"""Server-sent events: chunks with a prebuilt head, one write an update, back-pressure, and a clean end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from server.errors import ApiError
from server.openai.replies import FINGERPRINT, Head, Usage

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_encode = msgspec.json.Encoder().encode


class ReaderGone(Exception):
    """The client closed the connection, or took nothing for longer than the stall timeout."""


class EventStream:
    """The chunks of one streamed answer. ``add`` collects, ``flush`` writes what was added in one go.

    A slow reader makes ``flush`` wait (the socket's buffers are bounded); the engine side merges updates meanwhile.
    ``kind``: the chunks' ``object``. ``with_usage``: every chunk has a ``usage`` key, null but in the last one.
    """

    def __init__(self, request: web.Request, head: Head, kind: str, with_usage: bool):
        keys = {"object": kind, **msgspec.structs.asdict(head), "system_fingerprint": FINGERPRINT}
        self._request = request
        self._head = b"data: " + _encode(keys)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._parts: list[bytes] = []
        self._response = web.StreamResponse(headers=_HEADERS)
        self.opened = False

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def open(self) -> None:
        """Sends the headers. Raises ``ReaderGone``."""
        try:
            await self._response.prepare(self._request)
        except ConnectionError as exc:
            raise ReaderGone("the client closed the connection") from exc
        self.opened = True

    def add(self, choice: msgspec.Struct, usage: Usage | None = None, extra: dict[str, Any] | None = None) -> None:
        """One chunk with one choice; ``usage`` for continuous usage; ``extra``: more keys of the chunk."""
        tail = self._tail if usage is None else b',"usage":' + _encode(usage) + b"}\n\n"
        middle = b"]" if extra is None else b"]," + _encode(extra)[1:-1]
        self._parts.append(b"%b%b%b%b" % (self._head, _encode(choice), middle, tail))

    def add_usage(self, usage: Usage) -> None:
        self._parts.append(self._head + b'],"usage":' + _encode(usage) + b"}\n\n")

    async def flush(self, stall_timeout: float) -> None:
        """Raises ``ReaderGone``."""
        if not self._parts:
            return
        data = b"".join(self._parts)
        self._parts.clear()
        await self._write(data, stall_timeout)

    async def finish(self, stall_timeout: float) -> None:
        self._parts.append(b"data: [DONE]\n\n")
        await self.flush(stall_timeout)
        await self._end(stall_timeout)

    async def fail(self, error: ApiError, stall_timeout: float) -> None:
        """The stream's last event is the error; there is no ``[DONE]``, so nobody takes the answer for whole."""
        self._parts.append(b"data: " + error.body() + b"\n\n")
        await self.flush(stall_timeout)
        await self._end(stall_timeout)

    async def _write(self, data: bytes, stall_timeout: float) -> None:
        try:
            async with asyncio.timeout(stall_timeout):
                await self._response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ReaderGone(f"the reader took nothing for {stall_timeout:g} s") from None
        except ConnectionError as exc:
            raise ReaderGone("the client closed the connection") from exc

    async def _end(self, stall_timeout: float) -> None:
        try:
            async with asyncio.timeout(stall_timeout):
                await self._response.write_eof()
        except (TimeoutError, ConnectionError) as exc:
            raise ReaderGone("the client went away at the end") from exc
