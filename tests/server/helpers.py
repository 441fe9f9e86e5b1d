"""A server in this process on a FakeEngine, and readers of its answers."""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from server.app import ServerSettings, make_app
from tests.fake_engine import FakeEngine

USER = [{"role": "user", "content": "hi"}]


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A coroutine function as a plain test."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))  # type: ignore[arg-type]

    return wrapper


class Api:
    """``post`` and ``stream`` with the model's name filled in."""

    def __init__(self, http: TestClient, engine: FakeEngine, app: web.Application):
        self.http, self.engine, self.app = http, engine, app

    async def post(self, path: str, body: dict[str, Any], status: int = 200, **kwargs: Any) -> dict[str, Any]:
        # a file: aiohttp warns about long bodies that it has to write in one go
        data = io.BytesIO(msgspec.json.encode(body))
        headers = {"Content-Type": "application/json"}
        async with self.http.post(path, data=data, headers=headers, **kwargs) as response:
            text = await response.text()
            assert response.status == status, (response.status, text[:500])
            return json.loads(text)

    def url(self, path: str) -> URL:
        """The path as it is, nothing of it normalized."""
        return URL(f"http://{self.http.host}:{self.http.port}{path}", encoded=True)

    async def complete(self, status: int = 200, **body: Any) -> dict[str, Any]:
        return await self.post("/v1/completions", {"model": "fake", "prompt": "x", "temperature": 0} | body, status)

    async def chat(self, status: int = 200, **body: Any) -> dict[str, Any]:
        return await self.post(
            "/v1/chat/completions", {"model": "fake", "messages": USER, "temperature": 0} | body, status
        )

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        start: dict[str, Any] = {"model": "fake", "temperature": 0, "stream": True}
        start |= {"messages": USER} if "chat" in path else {"prompt": "x"}
        async with self.http.post(path, json=start | body) as response:
            text = await response.text()
            assert response.status == 200, text[:500]
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return events(text)

    async def stream_chat(self, **body: Any) -> list[dict[str, Any]]:
        return await self.stream("/v1/chat/completions", **body)

    async def settled(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def api(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Api]:
    engine = engine or FakeEngine()
    app = make_app(engine, ServerSettings(**settings).validate())
    server = TestServer(app)
    await server.start_server()  # cancels handlers of closed connections, as run_server does
    async with TestClient(server) as http:
        yield Api(http, engine, app)


def events(text: str, done: bool = True) -> list[dict[str, Any]]:
    """The JSON of each event of a stream that ends with [DONE] (without it: ``done=False``)."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), lines[:3]
    datas = [line.removeprefix("data: ") for line in lines]
    if done:
        assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(p["text"] if "text" in p else p["delta"].get("content") or "" for p in parts)


def finish_reasons(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [p["finish_reason"] for p in parts if p["finish_reason"] is not None]


def flat(pieces: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(pieces))
