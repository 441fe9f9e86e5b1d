"""The official client on a real socket: its types must be able to hold our answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from aiohttp import web

from server.app import ServerSettings, make_app
from tests.fake_engine import TEXT, FakeEngine
from tests.server.helpers import run_async

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in another thread."""
    started, stop, found = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        engine = FakeEngine()
        runner = web.AppRunner(make_app(engine, ServerSettings(api_keys=("sk-test",))), handler_cancellation=True)
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
    yield f"http://127.0.0.1:{found[1]}/v1"
    found[0].call_soon_threadsafe(stop.set)
    thread.join(10)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    # strict: the client must not guess where a type does not fit
    with openai.OpenAI(base_url=url, api_key="sk-test", max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="x", temperature=0, logprobs=2, max_tokens=20)
    assert reply.choices[0].text == TEXT and reply.usage and reply.usage.completion_tokens == 7
    assert reply.choices[0].logprobs and reply.choices[0].logprobs.tokens
    assert reply.choices[0].finish_reason == "stop"
    # OpenAI's own chunks have a null finish_reason too, which its type for completions does not allow
    with openai.OpenAI(base_url=client.base_url, api_key="sk-test", max_retries=0) as loose:
        chunks = list(loose.completions.create(model="fake", prompt="x", temperature=0, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2, n=2, user="me", tools=[]
    )
    assert [choice.message.content for choice in reply.choices] == [TEXT, TEXT]
    assert reply.usage and reply.usage.prompt_tokens_details
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            temperature=0,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "ignore_eos": False},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == TEXT
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 7
    # a reply goes back in as history
    history = [*MESSAGES, reply.choices[0].message.model_dump(), *MESSAGES]
    assert client.chat.completions.create(model="fake", messages=history, max_tokens=1).choices


def test_models_and_errors(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x", temperature=-1)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_value"
    stranger = openai.OpenAI(base_url=url, api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_async_client(url: str) -> None:
    @run_async
    async def ask() -> None:
        async with openai.AsyncOpenAI(
            base_url=url, api_key="sk-test", max_retries=0, _strict_response_validation=True
        ) as client:
            replies = await asyncio.gather(
                *(client.completions.create(model="fake", prompt=f"p{i}", temperature=0) for i in range(8))
            )
            assert all(reply.choices[0].text == TEXT for reply in replies)
            stream = await client.chat.completions.create(model="fake", messages=MESSAGES, temperature=0, stream=True)
            parts = [c.delta.content or "" async for chunk in stream for c in chunk.choices]
            assert "".join(parts) == TEXT

    ask()
