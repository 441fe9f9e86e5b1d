"""Wrong requests: the right status, an error object that names the field, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from tests.fake_engine import TEXT, FakeEngine, queue_full
from tests.server.helpers import USER, Api, api, run_async

JSON = {"Content-Type": "application/json"}


async def check_error(response: aiohttp.ClientResponse, status: int) -> dict[str, Any]:
    body = await response.read()
    assert response.status == status, body[:300]
    assert len(body) < 8192 and b"Traceback" not in body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


async def alive(server: Api) -> None:
    async with server.http.get("/health") as response:
        assert response.status == 200
    assert (await server.complete(max_tokens=20))["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": "fake", "messages": [',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"model":"fake","prompt":"\xff\xfe"}',
        b'{"model":"fake","messages":[{"role":"user","content":"cut \\ud83d"}]}',
        b'{"model":"fake","messages":[{"role":"user","content":"\\ude00"}],"stream":true}',
        b'{"model":"fake","messages":[{"role":"user","content":"hi"}],"stop":["\\ud83d"]}',
        b'{"model":"fake","messages":"hi"}',
        b'{"model":"fake","messages":[{"role":"user","content":"hi"}],"temperature":1e999}',
        b'{"model":"fake","messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
    ],
)
@run_async
async def test_wrong_bodies(body: bytes) -> None:
    async with api() as server:
        async with server.http.post("/v1/chat/completions", data=body, headers=JSON) as response:
            await check_error(response, 400)
        await alive(server)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", "maybe"),
        ("stream", 1),
        ("seed", "abc"),
        ("seed", 1.5),
        ("seed", 2**64),
        ("n", 100000),
        ("n", 0),
        ("n", True),
        ("max_tokens", "5"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("temperature", "0"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logprobs", 2000000000),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("min_tokens", 20),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [""]),
        ("stop", ["s"] * 65),
        ("stop", "s" * 5000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [512]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [600]),
        ("bad_words", ["b"] * 50_000),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"600": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [1]),
        ("truncate_prompt_tokens", 0),
        ("cache_salt", ""),
        ("request_id", "a b"),
        ("request_id", "é"),
        ("request_id", "x" * 129),
        ("priority", 2**40),
        ("echo", "yes"),
        ("model", 5),
    ],
)
@run_async
async def test_wrong_values_name_the_field(field: str, value: Any) -> None:
    async with api(scheduling_policy="priority") as server:
        body = {"model": "fake", "prompt": "x", field: value}
        async with server.http.post("/v1/completions", json=body) as response:
            error = await check_error(response, 400)
        assert error["param"].startswith(field) and error["message"].startswith(error["param"])
        assert error["type"] == "invalid_request_error"
        assert not server.engine.asked


@run_async
async def test_thousands_of_wrong_messages_give_a_short_error() -> None:
    async with api() as server:
        messages = [{"role": 5, "content": {"a": str(i)}} for i in range(5000)]
        async with server.http.post("/v1/chat/completions", json={"model": "fake", "messages": messages}) as response:
            assert (await check_error(response, 400))["param"] == "messages[0].role"


@run_async
async def test_routes_and_methods() -> None:
    async with api() as server:
        async with server.http.get("/v1/chat/completions") as response:
            await check_error(response, 405)
            assert response.headers["Allow"] == "POST"
        for path in ("/v1/nope", "/", "//v1/completions", "/V1/completions", "/v1/load_lora_adapter"):
            async with server.http.session.post(server.url(path), json={"a": 1}) as response:
                await check_error(response, 404)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            body = {"model": "no-such", "prompt": "x"} if "chat" not in path else {"model": "no-such", "messages": USER}
            async with server.http.post(path, json=body) as response:
                assert (await check_error(response, 404))["code"] == "model_not_found"


@run_async
async def test_content_types() -> None:
    async with api() as server:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 2})
        for kind, status in (
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("application/json; charset=utf-8", 200),
            ("application/vnd.api+json", 200),
        ):
            async with server.http.post("/v1/completions", data=body, headers={"Content-Type": kind}) as response:
                assert response.status == status


@run_async
async def test_compressed_bodies_are_refused_unread() -> None:
    async with api() as server:
        for encoding in ("gzip", "deflate", "br", "zstd", "nonsense"):
            headers = JSON | {"Content-Encoding": encoding}
            async with server.http.post("/v1/completions", data=b"\x1f\x8b", headers=headers) as response:
                await check_error(response, 415)
        await alive(server)


@run_async
async def test_requests_that_are_not_http() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    raws = (
        b"GARBAGE\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
        head + b"Content-Length: -5\r\n\r\nabc",
        head + b"X-Request-Id: " + b"x" * 10_000 + b"\r\n\r\n",
    )
    async with api() as server:
        for raw in raws:
            reader, writer = await asyncio.open_connection(server.http.host, server.http.port)
            writer.write(raw)
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.split(b"\r\n")[0].endswith(b"400 Bad Request") and b"Traceback" not in answer
            writer.close()
        await alive(server)


@run_async
async def test_large_bodies() -> None:
    async with api(max_body_bytes=100_000) as server:

        async def chunked() -> Any:
            for _ in range(50):
                yield b" " * 4096

        for data in (b"x" * 200_000, chunked()):
            async with server.http.post("/v1/completions", data=data, headers=JSON) as response:
                await check_error(response, 413)
        await alive(server)


@run_async
async def test_null_characters_and_combining_marks_are_text() -> None:
    async with api() as server:
        reply = await server.complete(prompt="a\u0000b", echo=True, max_tokens=1)
        assert reply["choices"][0]["text"].startswith("a\u0000b")
        await server.complete(400, prompt="e" + "\u0301" * 500_000)


@run_async
async def test_a_full_queue_is_429() -> None:
    async with api() as server:
        server.engine.refuse = queue_full()
        for stream in (False, True):
            body = {"model": "fake", "prompt": "x", "stream": stream}
            async with server.http.post("/v1/completions", json=body) as response:
                assert (await check_error(response, 429))["code"] == "queue_full"
                assert response.headers["Retry-After"] == "7"
        async with server.http.get("/metrics") as response:
            assert 'admission_rejections_total{engine="0",model_name="fake",reason="queue_full"} 2.0' in (
                await response.text()
            )


@run_async
async def test_an_error_inside_the_server_is_500_without_details() -> None:
    async with api() as server:
        server.engine.refuse = KeyError("secret")
        async with server.http.post("/v1/completions", json={"model": "fake", "prompt": "x"}) as response:
            assert "secret" not in json.dumps(await check_error(response, 500))


@run_async
async def test_other_requests_go_on_while_a_long_prompt_is_checked() -> None:
    async with api(FakeEngine(max_model_len=1024)) as server:

        async def health() -> float:
            start = time.monotonic()
            async with server.http.get("/health") as response:
                assert response.status == 200
            return time.monotonic() - start

        heavy = [
            server.complete(400, prompt="a" * 200_000),
            server.complete(400, prompt="ab c" * 5_000_000),
            server.chat(400, messages=[{"role": "user", "content": "é" * 2_000_000}]),
            server.complete(400, prompt="x", max_tokens=8, stop=[f"s{i}" for i in range(100_000)]),
        ]
        start = time.monotonic()
        tasks = [asyncio.ensure_future(work) for work in heavy]
        worst = 0.0
        while not all(task.done() for task in tasks):
            worst = max(worst, await health())
            await asyncio.sleep(0.01)
        errors = [task.result()["error"] for task in tasks]
        assert [error["param"] for error in errors] == ["prompt", "prompt", "messages", "stop"]
        assert all("1024" in error["message"] for error in errors[:3])
        assert worst < 1.0 and time.monotonic() - start < 20


@run_async
async def test_a_long_prompt_is_refused_within_two_seconds() -> None:
    async with api() as server:
        start = time.monotonic()
        error = (await server.complete(400, prompt="a" * 200_000, max_tokens=1))["error"]
        assert time.monotonic() - start < 2.0
        assert error["code"] == "context_length_exceeded" and "1024" in error["message"]
