"""Adapters over HTTP on the fake engine: their names as models, the operators' routes, folders, and the metric."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lmjax import cli
from lmjax.config import ConfigError, EngineConfig
from lmjax.flags import engine_options, settings_of
from lmjax.protocol import PoolingInfo
from lmjax.types import AdapterError, OrderError
from server.settings import ServerSettings, SettingsError
from tests.fake_engine import TEXT, FakeEngine
from tests.server.helpers import Api, api, joined, run_async

ADMIN = {"Authorization": "Bearer sk-admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def engine(**facts: Any) -> FakeEngine:
    return FakeEngine(max_loras=2, **facts)


def adapter(folder: Path, name: str = "a") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (path / file).write_text("{}")
    return path


def settings(folder: Path | None) -> dict[str, Any]:
    return {"admin_api_keys": ("sk-admin",)} | ({} if folder is None else {"lora_dir": str(folder)})


async def order(server: Api, path: str, body: Any, status: int = 200) -> Any:
    async with server.http.post(path, json=body, headers=ADMIN) as response:
        text = await response.text()
        assert response.status == status, (body, response.status, text)
        return text if status == 200 else (await response.json())["error"]


async def load(server: Api, name: str, path: Any) -> None:
    said = await order(server, LOAD, {"lora_name": name, "lora_path": str(path)})
    assert said == f"Success: LoRA adapter '{name}' added successfully."


def test_every_route_takes_an_adapter_as_its_model(tmp_path: Path) -> None:
    @run_async
    async def run() -> None:
        pooling = PoolingInfo("embed", "last", True, 4)
        async with api(engine(pooling=pooling), **settings(tmp_path)) as server:
            asked, pooled = server.engine.asked, server.engine.pooled
            await load(server, "sql", adapter(tmp_path))
            base = await server.complete(max_tokens=5)
            for reply in (await server.complete(model="sql", max_tokens=5), await server.chat(model="sql")):
                assert reply["model"] == "sql" and asked[-1].lora == "sql"
            assert base["model"] == "fake" and asked[0].lora is None
            several = await server.complete(model="sql", prompt=["x", "y"], n=2, max_tokens=5)
            assert [a.lora for a in asked[-2:]] == ["sql", "sql"]
            assert several["choices"][0]["text"] != base["choices"][0]["text"]
            for path in ("/v1/completions", "/v1/chat/completions"):
                chunks = await server.stream(path, model="sql", max_tokens=5)
                assert {chunk["model"] for chunk in chunks} == {"sql"} and asked[-1].lora == "sql"
                assert joined(chunks) != TEXT[:4]
            count = len(asked)
            for path, body in (
                ("/v1/embeddings", {"input": "x"}),
                ("/v1/score", {"text_1": "x", "text_2": "y"}),
                ("/v1/rerank", {"query": "x", "documents": ["y"]}),
            ):
                for model, lora in (("sql", "sql"), ("fake", None)):
                    del pooled[:]
                    assert (await server.post(path, body | {"model": model}))["model"] == model
                    assert {rest["lora"] for _, _, rest in pooled} == {lora}, path
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [97]})):
                plain = await server.post(path, body)
                assert await server.post(path, body | {"model": "sql"}) == plain
            assert len(asked) == count
            # no other route takes a model's name
            takes_model = {
                *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"),
                *("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
            }
            posts = {route.resource.canonical for route in server.app.router.routes() if route.method == "POST"}
            assert posts - takes_model == {"/ping", "/v1/weights", "/sleep", "/wake_up", LOAD, UNLOAD}

    run()


def test_loaded_listed_and_unloaded(tmp_path: Path) -> None:
    @run_async
    async def run() -> None:
        async with api(engine(), served_model_names=("base", "other"), **settings(tmp_path)) as server:

            async def models() -> dict[str, Any]:
                listed = await (await server.http.get("/v1/models")).json()
                return {card["id"]: card for card in listed["data"]}

            assert [*await models()] == ["base", "other"]
            path = adapter(tmp_path)
            await load(server, "org/sql", path)
            card = (await models())["org/sql"]
            assert (card["parent"], card["root"], card["max_model_len"]) == ("base", str(path), 1024)
            assert (await models())["base"]["parent"] is None
            assert await (await server.http.get("/v1/models/org/sql")).json() == card
            assert (await server.complete(model="org/sql", max_tokens=1))["model"] == "org/sql"
            said = await order(server, UNLOAD, {"lora_name": "org/sql"})
            assert said == "Success: LoRA adapter 'org/sql' removed successfully."
            assert [*await models()] == ["base", "other"]
            for reply in (
                await server.complete(404, model="org/sql"),
                await server.chat(404, model="org/sql"),
                await server.post("/tokenize", {"model": "org/sql", "prompt": "x"}, 404),
                await (await server.http.get("/v1/models/org/sql")).json(),
            ):
                assert reply["error"]["code"] == "model_not_found", reply
            assert server.engine.orders == [("load_lora", "org/sql", str(path)), ("unload_lora", "org/sql")]

    run()


def test_what_is_wrong_is_a_400_that_names_the_field_and_changes_nothing(tmp_path: Path) -> None:
    folder, outside = tmp_path / "allowed", adapter(tmp_path, "outside")
    adapter(folder, "good")
    (folder / "link").symlink_to(outside)
    (folder / "inner").symlink_to(folder / "good")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "file").write_text("")
    stolen = adapter(folder, "stolen")
    (stolen / "adapter_model.safetensors").unlink()
    (stolen / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (tmp_path / "allowed2").mkdir()

    def path_of(value: Any) -> dict[str, Any]:
        return {"lora_name": "x", "lora_path": value}

    bad = [
        ({"lora_path": "good"}, "lora_name", "missing"),
        ({"lora_name": "x"}, "lora_path", "missing"),
        ({"lora_name": "", "lora_path": "good"}, "lora_name", "missing"),
        ({"lora_name": 3, "lora_path": "good"}, "lora_name", "expected"),
        ({"lora_name": ["x"], "lora_path": "good"}, "lora_name", "expected"),
        (path_of(None), "lora_path", "missing"),
        (path_of(True), "lora_path", "expected"),
        (path_of({"a": 1}), "lora_path", "expected"),
        ({"lora_name": "fake", "lora_path": "good"}, "lora_name", "name of the model itself"),
        ({"lora_name": "here", "lora_path": "good"}, "lora_name", "is taken"),
        ({"lora_name": "a\nb", "lora_path": "good"}, "lora_name", "printable"),
        ({"lora_name": "n" * 257, "lora_path": "good"}, "lora_name", "256"),
        (path_of("good") | {"load_inplace": True}, "load_inplace", "unload it"),
        (path_of("good") | {"lora_int_id": 1}, "lora_int_id", "unknown field"),
        (path_of("good") | {"is_3d_lora_weight": False}, "is_3d_lora_weight", "one matrix"),
        *((path_of(p), "lora_path", "inside the server's --lora-dir") for p in (
            *("..", "../outside", "link", "good/../../outside", "/", "/etc", "/no/such/folder", str(outside)),
            *(str(tmp_path / "allowed2"), "link/../outside", "../allowed2"),
        )),
        *((path_of(p), "lora_path", "no such directory") for p in ("nope", "file", "good/adapter_config.json")),
        (path_of("stolen"), "lora_path", "adapter_model.safetensors leads out"),
        (path_of("g\0od"), "lora_path", "null"),
        (path_of("x" * 5000), "lora_path", "too long"),
        (path_of("circle"), "lora_path", "circle"),
    ]  # fmt: skip

    @run_async
    async def run() -> None:
        async with api(engine(), **settings(folder)) as server:
            await load(server, "here", "good")
            before, models = list(server.engine.orders), await (await server.http.get("/v1/models")).text()
            for body, field, said in bad:
                error = await order(server, LOAD, body, 400)
                assert error["param"] == field and said in error["message"], (body, error)
            error = await order(server, LOAD + "?x=1", path_of("good"), 400)
            assert error["param"] == "x"
            for body, status, field in (
                ({"lora_name": "nope"}, 404, "lora_name"),
                ({"lora_name": "fake"}, 404, "lora_name"),
                ({}, 400, "lora_name"),
                ({"lora_name": 1}, 400, "lora_name"),
                ({"lora_name": "here", "lora_int_id": 1}, 400, "lora_int_id"),
            ):
                assert (await order(server, UNLOAD, body, status))["param"] == field
            # what the engine finds in the files
            for error, status in ((AdapterError("r: got 99, at most 16"), 400), (OrderError("oom", True), 500)):
                server.engine.refuse_orders = error
                assert (await order(server, LOAD, path_of("good"), status))["message"] == str(error)
            assert server.engine.orders == before
            assert await (await server.http.get("/v1/models")).text() == models
            server.engine.refuse_orders = None
            for i, good in enumerate(("inner", "good/", "./good", "good/../inner", str(folder / "good"))):
                await load(server, f"n{i}", good)
                assert server.engine.orders[-1] == ("load_lora", f"n{i}", str(folder / "good"))

    run()


@run_async
async def test_a_folder_that_goes_is_a_400() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        app = api(engine(), **settings(Path(folder)))
        async with app as server:
            os.rmdir(folder)
            error = await order(server, LOAD, {"lora_name": "x", "lora_path": "x"}, 400)
            assert error["param"] == "lora_path"
            os.mkdir(folder)


@run_async
async def test_off_without_the_flags() -> None:
    body = {"lora_name": "x", "lora_path": "x"}
    async with api(**settings(None)) as server:
        for path, sent in ((LOAD, body), (UNLOAD, {"lora_name": "x"})):
            assert "--enable-lora" in (await order(server, path, sent, 404))["message"]
        assert "lora_requests_info" not in await (await server.http.get("/metrics")).text()
    async with api(engine(), **settings(None)) as server:
        assert "--lora-dir" in (await order(server, LOAD, body, 404))["message"]
        assert (await order(server, UNLOAD, {"lora_name": "x"}, 404))["param"] == "lora_name"


def test_requests_that_are_there_are_answered_when_their_adapter_goes(tmp_path: Path) -> None:
    @run_async
    async def run() -> None:
        slow = engine(step=0.02)
        async with api(slow, **settings(tmp_path)) as server:
            await load(server, "a", adapter(tmp_path))
            asked = [asyncio.ensure_future(server.complete(model="a", max_tokens=20)) for _ in range(3)]
            await server.settled(lambda: slow.running == 3)
            await order(server, UNLOAD, {"lora_name": "a"})
            await server.complete(404, model="a")
            assert {(await reply)["usage"]["completion_tokens"] for reply in asked} == {20}

    run()


def test_a_stream_whose_adapter_went_before_it_began_is_a_404(tmp_path: Path) -> None:
    @run_async
    async def run() -> None:
        fake = engine()
        generate = fake.generate

        def late(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            fake.loras.clear()
            return found

        fake.generate = late  # type: ignore[method-assign]
        async with api(fake, **settings(tmp_path)) as server:
            for stream in (True, False):
                await load(server, "a", tmp_path / "a" if stream is False else adapter(tmp_path))
                reply = await server.complete(404, model="a", stream=stream)
                assert reply["error"]["code"] == "model_not_found" and reply["error"]["param"] == "model"

    run()


@run_async
async def test_the_metric() -> None:
    fake = engine()
    async with api(fake) as server:
        fake.stats().running_loras, fake.stats().waiting_loras = ["a", "b"], ["c"]
        text = await (await server.http.get("/metrics")).text()
        [line] = [line for line in text.splitlines() if line.startswith("lmjax:lora_requests_info{")]
        for label in ('max_lora="2"', 'running_lora_adapters="a,b"', 'waiting_lora_adapters="c"', 'engine="0"'):
            assert label in line
        assert float(line.split()[-1]) > 1e9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lora-dir", "/"], "--lora-dir: needs --admin-api-key"),
        (["--lora-dir", "/", "--admin-api-key", "k"], "--lora-dir: got '/', but needs --enable-lora"),
        (["--lora-dir", "/no", "--admin-api-key", "k", "--enable-lora"], "--lora-dir: there is no directory /no"),
        (["--max-loras", "3"], "--max-loras: got 3, but needs --enable-lora"),
        (["--enable-lora", "--max-loras", "0"], "--max-loras: got 0, must be an integer of at least 1"),
        (["--enable-lora", "--max-lora-rank", "12"], "--max-lora-rank: got 12, must be one of 8, 16, 32, 64, 128, 256"),
        (["--enable-lora", "--max-cpu-loras", "2"], "--max-cpu-loras: got 2, must be at least --max-loras (8)"),
        (["--lora-modules", "a=/x"], "--lora-modules: got {'a': '/x'}, but needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "--lora-modules: got 'a', must be name=path or a JSON object"),
        (["--enable-lora", "--lora-modules", "=/x"], "--lora-modules: got the name '', must be 1 to 256"),
        (["--enable-lora", "--lora-modules", "a="], "--lora-modules: a: got '', must be the path"),
        (["--enable-lora", "--lora-modules", "a=1", "a=2"], "--lora-modules: got the name 'a' twice"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "must have name and path, two texts, and nothing else"),
        (["--enable-lora", "--lora-modules", '{"name": 1, "path": "x"}'], "must have name and path, two texts"),
        (["--enable-lora", "--lora-modules", "{"], "--lora-modules: got '{', which is no JSON"),
        (["--enable-lora", "--lora-modules", "smollm2=/x"], "'smollm2', which is that of the model itself"),
        (
            ["--enable-lora", "--served-model-name", "m", "n", "--lora-modules", "n=/x"],
            "--lora-modules: got the name 'n', which is that of the model itself",
        ),
    ],
)
def test_flags(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["serve", *arguments])
    except SystemExit as end:
        code = end.code
    written = capsys.readouterr().err
    assert code == 2 and said in written and written.count("\n") == 1, written


def test_modules_in_all_their_forms(tmp_path: Path) -> None:
    def parsed(*arguments: str) -> Any:
        return settings_of(cli._parser().parse_args(["serve", *arguments]), engine_options()).get("lora_modules")

    given = ["--lora-modules", "a=/x", '{"name": "b", "path": "/y=z"}', "--lora-modules", "c=/d=e"]
    assert parsed(*given) == {"a": "/x", "b": "/y=z", "c": "/d=e"}
    file = tmp_path / "config.json"
    for entry in ({"a": "/x"}, ["a=/x"], [{"name": "a", "path": "/x"}]):
        file.write_text(json.dumps({"enable-lora": True, "lora-modules": entry}))
        assert parsed("--config", str(file)) == {"a": "/x"}, entry
    for wrong in ("a=/x", ["a"], [3], [{"name": "a"}]):
        file.write_text(json.dumps({"lora-modules": wrong}))
        with pytest.raises(ConfigError, match="--lora-modules: got"):
            parsed("--config", str(file))
    with pytest.raises(ConfigError, match="--lora-modules: a: got 3, must be the path"):
        EngineConfig(enable_lora=True, lora_modules={"a": 3}).validate()  # type: ignore[dict-item]


def test_the_folder_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--lora-dir: needs --admin-api-key"):
        ServerSettings(lora_dir=str(tmp_path)).validate()
