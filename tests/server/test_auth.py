"""API keys, CORS, request ids, the access log, the root path."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from server.routes import ROUTES
from tests.server.helpers import Api, api, run_async

BODY = {"model": "fake", "prompt": "x", "max_tokens": 1}
KEYS = ("sk-test", "sk-other")
OPEN = {"/health", "/ready", "/ping"}


async def status(server: Api, headers: list[tuple[str, str]], path: str = "/v1/completions") -> int:
    async with server.http.post(path, json=BODY, headers=headers) as response:
        if response.status == 401:
            assert (await response.json())["error"]["type"] == "authentication_error"
        return response.status


@run_async
async def test_keys() -> None:
    async with api(api_keys=KEYS) as server:
        for headers, expected in (
            ([], 401),
            ([("Authorization", "Bearer sk-test")], 200),
            ([("Authorization", "bearer sk-other")], 200),
            ([("x-api-key", "sk-test")], 200),
            ([("Authorization", "Bearer sk-tes")], 401),
            ([("Authorization", "Bearer sk-testx")], 401),
            ([("Authorization", "Bearer ")], 401),
            ([("Authorization", "Bearer")], 401),
            ([("Authorization", "sk-test")], 401),
            ([("Authorization", "Basic sk-test")], 401),
            ([("Authorization", "Bearer sé")], 401),
            ([("Authorization", "Bearer sk-test"), ("Authorization", "Bearer nope")], 401),
            ([("x-api-key", "sk-test"), ("x-api-key", "sk-test")], 401),
            ([("x-api-key", "Bearer sk-test")], 401),
        ):
            assert await status(server, headers) == expected, headers


@run_async
async def test_no_route_is_forgotten() -> None:
    async with api(api_keys=KEYS, root_path="/llm") as server:
        paths = {(method, path.replace("{id:.+}", "fake")) for method, path, _ in ROUTES}
        paths |= {("POST", path) for path in ("//v1/completions", "/V1/completions", "/v1/load_lora_adapter")}
        paths |= {("POST", path) for path in ("/health/../v1/completions", "/ready/", "/nope", "/v1/../health/x")}
        for method, path in paths:
            for prefix in ("", "/llm"):
                async with server.http.session.request(method, server.url(prefix + path), json=BODY) as response:
                    expected = 200 if path in OPEN else 401
                    assert response.status == expected, (method, prefix + path)


@run_async
async def test_a_header_that_is_not_utf8_is_401() -> None:
    import asyncio

    async with api(api_keys=KEYS) as server:
        reader, writer = await asyncio.open_connection(server.http.host, server.http.port)
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"
        )
        assert b" 401 " in (await reader.read()).split(b"\r\n")[0]
        writer.close()


def test_keys_are_compared_in_constant_time() -> None:
    source = (Path(__file__).parents[2] / "server" / "middleware.py").read_text()
    assert "hmac.compare_digest" in source


@run_async
async def test_request_ids() -> None:
    async with api() as server:
        for given, kept in (("abc-123", True), ("", False), ("a b", False), ("é", False), ("x" * 129, False)):
            async with server.http.get("/health", headers={"X-Request-Id": given}) as response:
                answered = response.headers["X-Request-Id"]
                assert (answered == given) is kept and 1 <= len(answered) <= 128 and answered.isascii()
        body = BODY | {"stream": True}
        async with server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "s1"}) as response:
            assert response.headers["X-Request-Id"] == "s1"
        assert all("s1" not in (asked.request_id or "") for asked in server.engine.asked)


def test_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lmjax.access")

    @run_async
    async def ask() -> None:
        async with api(api_keys=KEYS) as server:
            headers = [("Authorization", "Bearer sk-test"), ("X-Request-Id", "r1")]
            assert await status(server, headers) == 200
            assert await status(server, headers, "/v1/completions?api_key=sk-test") == 200
            assert await status(server, [("Authorization", "Bearer sk-wrong")]) == 401

    ask()
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "lmjax.access"]
    first = {key: lines[0][key] for key in ("method", "path", "status", "request_id", "prompt_tokens")}
    assert first == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "r1",
        "prompt_tokens": 1,
    }
    assert lines[0]["completion_tokens"] == 1 and lines[0]["ms"] >= 0 and lines[2]["status"] == 401
    assert "sk-" not in json.dumps(lines)


@run_async
async def test_cors() -> None:
    preflight = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with api(allowed_origins=("https://a.example",), api_keys=KEYS) as server:
        async with server.http.options("/v1/completions", headers=preflight) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        async with server.http.options("/v1/completions", headers=preflight | {"Origin": "https://b"}) as response:
            assert response.status == 401 and "Access-Control-Allow-Origin" not in response.headers
        async with server.http.get("/health", headers={"Origin": "https://a.example"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Vary"] == "Origin"
    async with api() as server, server.http.get("/health", headers={"Origin": "https://a.example"}) as response:
        assert "Access-Control-Allow-Origin" not in response.headers


@run_async
async def test_root_path() -> None:
    async with api(root_path="/llm") as server:
        for prefix in ("", "/llm"):
            assert await status(server, [], prefix + "/v1/completions") == 200
        assert await status(server, [], "/other/v1/completions") == 404
