"""Routes for who runs the server: their key, their bodies, and what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmjax.types import OrderError
from server import adapters, admin
from server.middleware import ADMIN_PATHS
from server.settings import ServerSettings, SettingsError
from tests.fake_engine import FakeEngine
from tests.server.helpers import Api, api, run_async

ADMIN = {"Authorization": "Bearer sk-admin"}
USER = {"Authorization": "Bearer sk-user"}
ROUTES = (*admin.ROUTES, *adapters.ROUTES)
BODIES: dict[str, Any] = {
    "/v1/weights": {"path": "/models/new"},
    "/v1/load_lora_adapter": {"lora_name": "new", "lora_path": "new"},
    "/v1/unload_lora_adapter": {"lora_name": "new"},
}


async def ask(server: Api, method: str, path: str, body: Any = None, headers: Any = ADMIN) -> tuple[int, Any]:
    async with server.http.request(method, path, json=body, headers=headers) as response:
        reply = response.json if response.content_type == "application/json" else response.text
        return response.status, await reply()


@run_async
async def test_they_are_off_without_a_key() -> None:
    async with api() as server:
        for method, path, _ in ROUTES:
            status, reply = await ask(server, method, path, BODIES.get(path))
            assert status == 404 and "--admin-api-key" in reply["error"]["message"], path
        assert not server.engine.orders
    assert {path for _, path, _ in ROUTES} == set(ADMIN_PATHS)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_they_have_a_key_of_their_own(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    settings = {"root_path": "/llm", "lora_dir": str(tmp_path)}

    @run_async
    async def run() -> None:
        engine = FakeEngine(max_loras=1)
        async with api(engine, admin_api_keys=("sk-admin",), api_keys=("sk-user",), **settings) as server:
            for headers in ({}, USER, {"x-api-key": "sk-adminx"}):
                for method, path, _ in ROUTES:
                    status, reply = await ask(server, method, prefix + path, BODIES.get(path), headers)
                    assert status == 401 and reply["error"]["type"] == "authentication_error", (path, headers)
            assert not server.engine.orders
            for method, path, _ in ROUTES:
                status, _ = await ask(server, method, prefix + path, BODIES.get(path))
                assert status == 200, path
            body = {"model": "fake", "prompt": "x", "max_tokens": 1}
            assert (await ask(server, "POST", "/v1/completions", body))[0] == 401  # it opens nothing else
            # a path written in another way leads to the same handler, and that looks at the key, too
            for headers, expected in ((ADMIN, 200), (USER, 401), ({}, 401)):
                async with server.http.session.get(server.url("/v1/%77eights"), headers=headers) as response:
                    assert response.status == expected, headers

    run()


@run_async
async def test_weights() -> None:
    async with api(admin_api_keys=("sk-admin",)) as server:
        assert await ask(server, "GET", "/v1/weights") == (200, {"version": 0})
        status, reply = await ask(server, "POST", "/v1/weights", {"path": "/a", "version": None})
        assert status == 200 and reply["version"] == 1 and reply["seconds"] >= 0
        body = {"path": "/b", "version": "v2", "kv_cache": "recompute"}
        assert (await ask(server, "POST", "/v1/weights", body))[0] == 200
        assert await ask(server, "GET", "/v1/weights") == (200, {"version": "v2"})
        assert server.engine.orders == [("load", "/a", None, "keep"), ("load", "/b", "v2", "recompute")]
        for body, field in (
            ({}, "path"),
            ({"path": ""}, "path"),
            ({"path": 3}, "path"),
            ({"path": "/a", "version": 1.5}, "version"),
            ({"path": "/a", "kv_cache": 1}, "kv_cache"),
            ({"path": "/a", "kvcache": "keep"}, "kvcache"),
        ):
            status, reply = await ask(server, "POST", "/v1/weights", body)
            assert status == 400 and field in reply["error"]["message"], (body, reply)
        for error, expected in ((OrderError("/x: no such file"), 400), (OrderError("no memory", internal=True), 500)):
            server.engine.refuse_orders = error
            status, reply = await ask(server, "POST", "/v1/weights", {"path": "/x"})
            assert status == expected and reply["error"]["message"] == str(error)
        text = await (await server.http.get("/metrics")).text()
        assert 'weight_version="v2"' in text


@run_async
async def test_sleep_and_wake() -> None:
    async with api(admin_api_keys=("sk-admin",)) as server:

        async def state() -> tuple[bool, int, int]:
            _, reply = await ask(server, "GET", "/is_sleeping")
            ready, health = [(await server.http.get(path)).status for path in ("/ready", "/health")]
            return reply["is_sleeping"], ready, health

        assert await state() == (False, 200, 200)
        assert (await ask(server, "POST", "/sleep"))[0] == 200
        assert await state() == (True, 503, 200)
        assert "lmjax:sleep_level" in (text := await (await server.http.get("/metrics")).text())
        assert next(line for line in text.splitlines() if line.startswith("lmjax:sleep_level")).endswith(" 1.0")
        assert (await ask(server, "POST", "/sleep?level=2"))[0] == 200
        assert (await ask(server, "POST", "/wake_up"))[0] == 200
        assert await state() == (False, 200, 200)
        assert server.engine.orders == [("sleep", 1), ("sleep", 2), ("wake",)]
        for path in ("/sleep?level=3", "/sleep?level=", "/sleep?mode=abort", "/wake_up?tags=weights"):
            status, reply = await ask(server, "POST", path)
            assert status == 400 and reply["error"]["param"] in path, path
        for path, body in (("/sleep", {"level": 2}), ("/wake_up", {"path": "/a"})):
            status, reply = await ask(server, "POST", path, body)
            assert status == 400 and reply["error"]["param"] == "body", path
        for method, path in (("GET", "/is_sleeping?x=1"), ("GET", "/v1/weights?x=1"), ("POST", "/v1/weights?x=1")):
            status, reply = await ask(server, method, path)
            assert status == 400 and reply["error"]["param"] == "x", path


@run_async
async def test_tokens_come_with_the_version_that_drew_them() -> None:
    async with api(admin_api_keys=("sk-admin",)) as server:
        [plain] = (await server.complete(return_token_ids=True, max_tokens=3))["choices"]
        [chat] = (await server.chat(return_token_ids=True, max_tokens=3))["choices"]
        assert plain["weight_versions"] == chat["weight_versions"] == [0, 0, 0]
        assert "weight_versions" not in (await server.complete(max_tokens=3))["choices"][0]
        chunks = await server.stream(return_token_ids=True, max_tokens=2)
        assert [chunk["choices"][0]["weight_versions"] for chunk in chunks] == [[0], [0]]


def test_the_keys_differ() -> None:
    with pytest.raises(SettingsError, match="--admin-api-key: must differ"):
        ServerSettings(api_keys=("a",), admin_api_keys=("a",)).validate()
    with pytest.raises(SettingsError, match="--admin-api-key: a key must be printable"):
        ServerSettings(admin_api_keys=("",)).validate()
