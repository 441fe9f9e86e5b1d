"""``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank`` on a FakeEngine, with the official client where it has them."""

from __future__ import annotations

import asyncio
import base64
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from tokenizers import processors

from lmjax.protocol import PoolingInfo
from lmjax.text.tokenizer import load_tokenizer
from lmjax.types import EngineDeadError, PoolingParams
from server.app import ServerSettings, make_app
from server.fields import EMBEDDINGS, FIELDS, RERANK, SCORE
from tests.fake_engine import FakeEngine, queue_full
from tests.fixtures import write_tokenizer
from tests.server.helpers import api, run_async

EMBED = PoolingInfo("embed", "cls", False, 4, (2, 3))  # the fake's embedding: (tokens, first id, last id, 1)
CROSS = PoolingInfo("score", "cls", False, 1)  # its score: tokens of the second text
PATHS = {EMBEDDINGS: "/v1/embeddings", SCORE: "/v1/score", RERANK: "/v1/rerank"}
BODIES: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": "ab"},
    SCORE: {"text_1": "ab", "text_2": ["c", "de"]},
    RERANK: {"query": "ab", "documents": ["c", "de"]},
}


def server(pooling: PoolingInfo | None = EMBED, **settings: Any) -> Any:
    return api(FakeEngine(pooling=pooling), scheduling_policy="priority", **settings)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    started, stop, found = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        runner = web.AppRunner(make_app(FakeEngine(pooling=EMBED), ServerSettings()), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.extend([asyncio.get_running_loop(), runner.addresses[0][1]])
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    url = f"http://127.0.0.1:{found[1]}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as made:
        yield made
    found[0].call_soon_threadsafe(stop.set)
    thread.join(10)


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ("abc", [[3, 97, 99, 1]]),
        (["abc", "d"], [[3, 97, 99, 1], [1, 100, 100, 1]]),
        ([7, 8], [[2, 7, 8, 1]]),
        ([[7, 8], [9]], [[2, 7, 8, 1], [1, 9, 9, 1]]),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_official_client(client: openai.OpenAI, given: Any, states: list[list[int]], encoding: Any) -> None:
    """Without an encoding it asks for base64 and decodes that itself."""
    options = {} if encoding is None else {"encoding_format": encoding}
    if encoding == "float":  # its own type has no room for the text of base64, which it decodes
        client = openai.OpenAI(base_url=client.base_url, api_key="x", max_retries=0, _strict_response_validation=True)
    reply = client.embeddings.create(model="fake", input=given, **options)
    found: list[Any] = [entry.embedding for entry in reply.data]
    if encoding == "base64":
        found = [list(struct.unpack("<4f", base64.b64decode(text))) for text in found]
    assert found == states and [entry.index for entry in reply.data] == list(range(len(states)))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(state[0] for state in states)
    assert reply.object == "list" and reply.model == "fake"


def test_dimensions_of_the_official_client(client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="fake", input="abc", dimensions=2).data[0].embedding == [3, 97]
    with pytest.raises(openai.BadRequestError, match="dimensions: got 4, must be one of 2, 3"):
        client.embeddings.create(model="fake", input="abc", dimensions=4)


async def ask(made: Any, route: str, status: int = 200, **body: Any) -> Any:
    return await made.post(PATHS[route], BODIES[route] | body, status)


@run_async
async def test_scores_of_a_cross_encoder() -> None:
    async with server(CROSS) as made:
        made.engine.tokenizer = pair_tokenizer()
        reply = await ask(made, SCORE)
        assert [entry["score"] for entry in reply["data"]] == [1.0, 2.0] and reply["usage"]["total_tokens"] == 7
        reply = await ask(made, SCORE, text_1=["a", "b"], text_2=["x", "yyyy"])
        assert [entry["score"] for entry in reply["data"]] == [1.0, 4.0]
        reply = await ask(made, RERANK, documents=["x", {"text": "zzz"}, "yy", "w"], top_n=3)
        assert [(r["index"], r["relevance_score"], r["document"]["text"]) for r in reply["results"]] == [
            (1, 3.0, "zzz"),
            (2, 2.0, "yy"),
            (0, 1.0, "x"),
        ]
        error = (await ask(made, EMBEDDINGS, 400))["error"]
        assert error["param"] == "model" and "cross-encoder" in error["message"]


def pair_tokenizer(special: str = "") -> Any:
    """One byte a token, and the second text has type 1, as BERT's; ``special`` comes before every text."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        tokenizer = load_tokenizer(directory)
    names = [(special, 120)] if special else []
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=f"{special} $A".strip(), pair="$A:0 $B:1", special_tokens=names
    )
    return tokenizer


@run_async
async def test_scores_of_embeddings_are_cosines() -> None:
    def cosine(a: list[float], b: list[float]) -> float:
        dot, norms = sum(x * y for x, y in zip(a, b, strict=True)), sum(x * x for x in a) * sum(x * x for x in b)
        return dot / norms**0.5

    async with server() as made:
        query, c, de = [2, 97, 98, 1], [1, 99, 99, 1], [2, 100, 101, 1]
        reply = await ask(made, SCORE)
        assert [e["score"] for e in reply["data"]] == pytest.approx([cosine(query, c), cosine(query, de)])
        assert reply["usage"]["prompt_tokens"] == 5 and len(made.engine.pooled) == 3  # the query once
        reply = await made.post("/rerank", BODIES[RERANK] | {"documents": ["c", "ab"], "return_documents": False})
        assert [r["index"] for r in reply["results"]] == [1, 0] and "document" not in reply["results"][0]


APPLIED: dict[str, list[dict[str, Any]]] = {  # values that must arrive, as of the engine's parameters
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 1}],
    "use_activation": [{"use_activation": True}],
    "priority": [{"priority": 3}],
    "cache_salt": [{"cache_salt": "salt"}],
    "dimensions": [{"dimensions": 2}],
}


@pytest.mark.parametrize("route", list(PATHS))
@run_async
async def test_every_field_does_what_the_table_says(route: str) -> None:
    async with server(EMBED if route == EMBEDDINGS else CROSS) as made:
        for name, field in FIELDS[route].items():
            if field.kind == "hint":
                await ask(made, route, **{name: "someone"})
                assert (await ask(made, route, 400, **{name: 5}))["error"]["param"] == name
            elif field.kind == "refused":
                assert (await ask(made, route, 400, **{name: "x"}))["error"]["param"] == name
            elif field.kind == "neutral":
                for value in field.neutral:
                    await ask(made, route, **{name: value})
                assert (await ask(made, route, 400, **{name: "x"}))["error"]["param"] == name
            elif name in APPLIED:
                for body in APPLIED[name]:
                    await ask(made, route, **body)
                    _, params, rest = made.engine.pooled[-1]
                    assert (getattr(params, name) if hasattr(params, name) else rest[name]) == body[name]
            else:
                assert name in {*BODIES[route], *OTHERS}, f"no test shows that {name} is applied"


OTHERS = ("model", "request_id", "encoding_format", "add_special_tokens", "normalize", "queries", "documents")
OTHERS += ("top_n", "return_documents")


@run_async
async def test_the_other_fields() -> None:
    async with server() as made:
        reply = await ask(made, EMBEDDINGS, request_id="mine", normalize=True)
        assert reply["id"] == "embd-mine"
        assert sum(x * x for x in reply["data"][0]["embedding"]) == pytest.approx(1.0)
        assert made.engine.pooled[-1][1] == PoolingParams(use_activation=True)
        first = await ask(made, SCORE)
        second = await made.post("/score", {"queries": "ab", "documents": ["c", "de"]})
        assert first["data"] == second["data"]
        made.engine.tokenizer = pair_tokenizer("x")
        for special, length in ((None, 3), (True, 3), (False, 2)):
            reply = await ask(made, EMBEDDINGS, add_special_tokens=special)
            assert reply["usage"]["prompt_tokens"] == length
        assert (await ask(made, EMBEDDINGS, 404, model="other"))["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (EMBEDDINGS, {"input": None}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ["a", 1]}, "input"),
        (EMBEDDINGS, {"input": [[512]]}, "input[0]"),
        (EMBEDDINGS, {"input": ["a", "a" * 5000]}, "input[1]"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": "a" * 5000}, "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"normalize": True, "use_activation": False}, "normalize"),
        (EMBEDDINGS, {"temperature": 1}, "temperature"),
        (SCORE, {"text_1": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"text_2": None}, "text_2"),
        (SCORE, {"text_1": "", "text_2": ["a", ""]}, "text_1"),
        (SCORE, {"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1[1]"),
        (SCORE, {"text_2": ["b", ""]}, "text_2[1]"),
        (SCORE, {"documents": "a"}, "documents"),
        (SCORE, {"use_activation": False}, "use_activation"),
        (RERANK, {"query": None}, "query"),
        (RERANK, {"query": ""}, "query"),
        (RERANK, {"documents": ["a", ""]}, "documents[1]"),
        (RERANK, {"documents": []}, "documents"),
        (RERANK, {"documents": [{"text": "a", "title": "b"}]}, "documents[0]"),
        (RERANK, {"top_n": -1}, "top_n"),
    ],
)
@run_async
async def test_errors_name_the_field(route: str, body: dict[str, Any], param: str) -> None:
    async with server() as made:
        error = (await ask(made, route, 400, **body))["error"]
        assert error["param"] == param
        assert not made.engine.pooled


@run_async
async def test_engines_that_cannot() -> None:
    async with server(None) as made:
        assert (await ask(made, EMBEDDINGS, 400))["error"]["param"] == "model"
        assert (await ask(made, SCORE, 400))["error"]["param"] == "model"
    async with api(FakeEngine(pooling=EMBED, generates=False)) as made:
        error = (await made.complete(400))["error"]
        assert error["param"] == "model" and "--runner pooling" in error["message"]
        assert (await made.chat(400))["error"]["param"] == "model"


@run_async
async def test_a_full_queue_a_dead_engine_and_a_client_that_goes() -> None:
    async with server() as made:
        made.engine.refuse = queue_full()
        assert (await ask(made, EMBEDDINGS, 429))["error"]["code"] == "queue_full"
        made.engine.refuse = EngineDeadError("gone")
        assert (await ask(made, EMBEDDINGS, 503))["error"]["code"] == "engine_dead"
        made.engine.refuse, made.engine.step = None, 30.0
        task = asyncio.ensure_future(ask(made, EMBEDDINGS, input=["a", "b", "c"]))
        while made.engine.running < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        while made.engine.running:
            await asyncio.sleep(0.01)
        assert made.engine.aborted == 3
        async with made.http.get("/metrics") as response:
            text = await response.text()
        assert 'finished_reason="abort"' in text
