"""``lmjax serve`` with a real tiny model whose weights are changed, and which sleeps, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fixtures import make_model
from tests.server.http_checks import at_once
from tests.server.live_server import LiveServer, Reply

pytestmark = pytest.mark.timeout(900)
ADMIN = {"Authorization": "Bearer sk-admin"}


@pytest.fixture(scope="module")
def server(_compile_cache: None) -> Iterator[LiveServer]:
    made = LiveServer("RAND", ("--admin-api-key", "sk-admin", "--max-model-len", "512"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other") / "m", seed=1)


def admin(server: LiveServer, method: str, route: str, /, **body: Any) -> Reply:
    return server.send(method, route, body or None, ADMIN)


def text(server: LiveServer, **body: Any) -> str:
    reply = server.complete(**({"prompt": "hello", "max_tokens": 24, "ignore_eos": True} | body))
    assert reply.status == 200, reply.body[:300]
    return reply.text()


def test_weights_change_under_running_requests(server: LiveServer, other: Path) -> None:
    before = text(server)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    begun, asked = threading.Barrier(5), {"max_tokens": 400, "temperature": 0}

    def stream(prompt: str) -> list[Any]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        chunks = iter(client.completions.create(model="RAND", prompt=prompt, stream=True, extra_body=extra, **asked))
        found = [next(chunks)]
        begun.wait(60)
        return [*found, *chunks]

    def change(_: str) -> Reply:
        begun.wait(60)
        return admin(server, "POST", "/v1/weights", path=str(other), version="new")

    *streams, reply = at_once(lambda one: change(one) if one == "change" else stream(one), [*"abcd", "change"])
    assert reply.status == 200 and reply.json["version"] == "new" and reply.json["seconds"] > 0, reply.body
    for chunks in streams:
        choices = [choice.model_dump() for chunk in chunks for choice in chunk.choices]
        versions = [version for choice in choices for version in choice["weight_versions"]]
        assert len(versions) == 400 and set(versions) == {0, "new"} and versions == sorted(versions, key=str)
        assert choices[-1]["finish_reason"] == "length"
    after = text(server)
    assert after != before
    fresh = LiveServer("RAND", ("--model", str(other), "--max-model-len", "512"))
    try:
        assert text(fresh) == after
    finally:
        fresh.close()
    assert server.metrics()["compiles_total"] == 0


def test_what_cannot_be_loaded_changes_nothing(server: LiveServer, other: Path, tmp_path: Path) -> None:
    before = text(server)
    version = admin(server, "GET", "/v1/weights").json
    another = make_model(tmp_path / "m", config={"intermediate_size": 32})
    broken = make_model(tmp_path / "b", seed=2)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    for body, said in (
        ({"path": "/nowhere"}, "no such file or directory"),
        ({"path": str(tmp_path)}, "no config.json"),
        ({"path": str(another)}, "another model"),
        ({"path": str(broken)}, "model.safetensors"),
        ({"path": str(other), "kv_cache": "drop"}, "kv_cache: got 'drop'"),
        ({"path": str(other), "version": ""}, "version: got ''"),
    ):
        reply = admin(server, "POST", "/v1/weights", **({"version": 5} | body))
        assert reply.status == 400 and said in reply.json["error"]["message"], (body, reply.body)
    assert admin(server, "GET", "/v1/weights").json == version and text(server) == before


@pytest.mark.parametrize("level", [1, 2])
def test_requests_wait_while_it_sleeps(server: LiveServer, level: int) -> None:
    before = text(server)
    assert admin(server, "POST", f"/sleep?level={level}").status == 200
    assert admin(server, "GET", "/is_sleeping").json == {"is_sleeping": True}
    assert server.send("GET", "/ready").status == 503 and server.send("GET", "/health").status == 200
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(text(server)))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive() and not found
    assert admin(server, "POST", "/wake_up").status == 200
    thread.join(60)
    assert found == [before] and server.send("GET", "/ready").status == 200
    assert server.metrics()["compiles_total"] == 0
