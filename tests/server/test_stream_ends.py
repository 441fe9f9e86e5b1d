"""How requests end early: the client goes, reads slowly or not at all, the engine fails or dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest

from server.state import STATE
from tests.fake_engine import FakeEngine
from tests.server.helpers import Api, api, events, joined, run_async

LONG = {"model": "fake", "prompt": "x", "temperature": 0, "max_tokens": 900}


def slow_engine() -> FakeEngine:
    return FakeEngine(script=False, step=0.01)


@pytest.mark.parametrize("stream", [True, False])
@run_async
async def test_a_client_that_goes_away_aborts_its_request(stream: bool) -> None:
    async with api(slow_engine()) as server:
        engine = server.engine
        tasks = [
            asyncio.ensure_future(server.http.post("/v1/completions", json=LONG | {"stream": stream, "n": n}))
            for n in (1, 2)
        ] + [asyncio.ensure_future(server.http.post("/v1/completions", json=LONG | {"prompt": ["a", "b"]}))]
        await server.settled(lambda: engine.running == 4)
        await asyncio.sleep(0.05)
        for task in tasks:
            if task.done():
                task.result().close()
            else:
                task.cancel()
        await server.settled(lambda: engine.running == 0, 2.0)
        assert engine.aborted == 4 and not server.app[STATE].active


@run_async
async def test_half_of_the_streams_are_cut_the_others_are_whole() -> None:
    async with api(FakeEngine(script=False, step=0.002)) as server:
        engine = server.engine

        async def one(i: int) -> str:
            body = LONG | {"prompt": f"p{i}", "max_tokens": 60, "stream": True}
            async with server.http.post("/v1/completions", json=body) as response:
                if i % 2:
                    await response.content.readline()
                    response.close()
                    return ""
                return joined(events(await response.text()))

        texts = await asyncio.gather(*(one(i) for i in range(32)))
        await server.settled(lambda: engine.running == 0)
        assert engine.aborted == 16
        for i in range(0, 32, 2):
            assert texts[i] == (await server.complete(prompt=f"p{i}", max_tokens=60))["choices"][0]["text"]


async def open_slow(server: Api, body: dict) -> socket.socket:
    """A stream whose reader has read nothing yet, with small buffers on its side."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (server.http.host, server.http.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    await loop.sock_sendall(sock, f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
    return sock


async def read_all(sock: socket.socket) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    while part := await loop.sock_recv(sock, 65536):
        parts.append(part)
    return b"".join(parts)


@run_async
async def test_a_slow_reader_holds_back_its_own_stream_only() -> None:
    async with api(FakeEngine(script=False, max_model_len=400_000)) as server:
        engine = server.engine
        # log-probabilities make the answer far larger than all buffers between
        body = LONG | {"max_tokens": 8_000, "stream": True, "logprobs": 20}
        sock = await open_slow(server, body)
        seen = -1
        while engine.yielded != seen:  # until the buffers are full and nothing is taken any more
            seen = engine.yielded
            await asyncio.sleep(0.3)
        assert 10 < seen < 7_000
        assert (await server.complete(max_tokens=5))["usage"]["completion_tokens"] == 5
        raw = await read_all(sock)
        sock.close()
        assert raw.rstrip().endswith(b"0") and b"data: [DONE]" in raw[-200:]
        assert raw.count(b'"finish_reason":"length"') == 1
        assert raw.count(b"data: {") == 8_000


@run_async
async def test_a_reader_that_takes_nothing_is_cut() -> None:
    async with api(FakeEngine(script=False, max_model_len=400_000, num_kv_blocks=30_000), stall_timeout=0.5) as server:
        sock = await open_slow(server, LONG | {"max_tokens": 100_000, "stream": True, "logprobs": 20})
        await server.settled(lambda: server.engine.running == 1)
        await server.settled(lambda: server.engine.running == 0, 10.0)
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in await read_all(sock)
        sock.close()
        assert server.engine.aborted == 1


@run_async
async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    async with api() as server:
        server.engine.fail_after = 3
        async with server.http.post("/v1/completions", json=LONG | {"stream": True}) as response:
            *chunks, last = events(await response.text(), done=False)
        assert joined(chunks) == "Say ABC"
        assert last["error"]["type"] == "server_error" and "the step failed" in last["error"]["message"]
        error = (await server.complete(500, max_tokens=9))["error"]
        assert error["code"] == "engine_error"


@run_async
async def test_the_engines_death_ends_every_stream() -> None:
    async with api(slow_engine()) as server:
        chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        posts = [
            server.http.post("/v1/completions", json=LONG | {"stream": True}),
            server.http.post("/v1/completions", json=LONG | {"stream": True, "prompt": ["a", "b"]}),
            server.http.post("/v1/chat/completions", json=chat),
        ]
        responses = [await post for post in posts]
        plain = asyncio.ensure_future(server.complete(503, max_tokens=900))
        await server.settled(lambda: server.engine.running == 5)
        await asyncio.sleep(0.05)
        server.engine.die("it was killed by signal 9")
        for response in responses:
            last = events(await asyncio.wait_for(response.text(), 5), done=False)[-1]
            assert "signal 9" in last["error"]["message"] and last["error"]["code"] == "engine_dead"
        assert "signal 9" in (await plain)["error"]["message"]
        for path in ("/health", "/ready"):
            async with server.http.get(path) as response:
                assert response.status == 503
        await server.complete(503)


@run_async
async def test_the_death_of_one_of_several_engines_is_503_too() -> None:
    """Alone, in a stream, and with several prompts; another engine takes the next try."""
    async with api(slow_engine()) as server:
        posts = [
            server.http.post("/v1/completions", json=LONG | {"stream": stream, "prompt": prompt})
            for stream in (False, True)
            for prompt in ("a", ["b", "c"])
        ]
        running = [asyncio.ensure_future(whole(post)) for post in posts]
        await server.settled(lambda: server.engine.running == 6)
        await asyncio.sleep(0.05)
        server.engine.lose("engine 1 was killed by signal 9")
        found = await asyncio.gather(*running)
        for status, headers, text in found[:2]:
            assert status == 503 and headers["Retry-After"] == "1", text
            error = json.loads(text)["error"]
            assert (error["type"], error["code"]) == ("service_unavailable", "engine_dead")
        for status, _, text in found[2:]:
            assert status == 200 and events(text, done=False)[-1]["error"]["code"] == "engine_dead"
        server.engine.lost = None
        await server.complete()


async def whole(post: Any) -> tuple[int, Any, str]:
    async with post as response:
        return response.status, response.headers, await response.text()


@run_async
async def test_while_no_engine_is_alive() -> None:
    async with api() as server:
        server.engine.ready = False
        async with server.http.get("/ready") as response:
            assert response.status == 503 and response.headers["Retry-After"]
        error = (await server.complete(503))["error"]
        assert error["code"] == "engine_dead" and "being started" in error["message"]


@run_async
async def test_headers_come_before_the_first_token_of_a_slow_engine() -> None:
    async with api(FakeEngine(step=1.6)) as server:
        async with asyncio.timeout(1.5):
            response = await server.http.post("/v1/completions", json=LONG | {"stream": True, "max_tokens": 1})
        assert response.status == 200
        assert joined(events(await response.text())) == "Say "


@run_async
async def test_two_requests_with_one_id_do_not_meet() -> None:
    async with api(slow_engine()) as server:

        async def one(prompt: str, cut: bool = False) -> str:
            body = LONG | {"prompt": prompt, "max_tokens": 30, "stream": True, "request_id": "same"}
            async with server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"}) as response:
                if cut:
                    await response.content.readline()
                    response.close()
                    return ""
                return joined(events(await response.text()))

        first, _, second = await asyncio.gather(one("a"), one("c", cut=True), one("b"))
        for prompt, text in (("a", first), ("b", second)):
            assert text == (await server.complete(prompt=prompt, max_tokens=30))["choices"][0]["text"]
        ids = [asked.request_id for asked in server.engine.asked]
        assert len(set(ids)) == len(ids)
