"""/v1/chat/completions and /tokenize on the FakeEngine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_engine import TEXT, FakeEngine
from tests.server.helpers import USER, api, finish_reasons, flat, joined, run_async


@run_async
async def test_plain_answer() -> None:
    async with api() as server:
        reply = await server.chat()
        assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
        (choice,) = reply["choices"]
        assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
        assert reply["usage"]["prompt_tokens"] == 21 and reply["usage"]["completion_tokens"] == 7


@run_async
async def test_stream() -> None:
    async with api() as server:
        chunks = await server.stream_chat(n=2, stream_options={"include_usage": True})
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        for index in (0, 1):
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in part["delta"] for part in parts[1:])
            assert joined(chunks, index) == TEXT and finish_reasons(chunks, index) == ["stop"]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 14


@run_async
async def test_max_tokens() -> None:
    async with api(FakeEngine(script=False, max_model_len=64)) as server:
        for body, count in (
            ({}, 64 - 21),
            ({"max_tokens": 5}, 5),
            ({"max_completion_tokens": 3}, 3),
            ({"max_completion_tokens": 3, "max_tokens": 9}, 3),
        ):
            reply = await server.chat(**body)
            assert reply["usage"]["completion_tokens"] == count
            assert reply["choices"][0]["finish_reason"] == "length"
        error = (await server.chat(400, max_completion_tokens=0))["error"]
        assert error["param"] == "max_completion_tokens"


@run_async
async def test_logprobs() -> None:
    async with api() as server:
        body = {"logprobs": True, "top_logprobs": 2}
        content = (await server.chat(**body))["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["Say ", "ABC", "DEF", "GHI", "JKL", " end", "</s>"]
        for entry in content:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == 2 and values == sorted(values, reverse=True)
        assert content[0]["bytes"] == list(b"Say ")
        chunks = await server.stream_chat(**body)
        pieces = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        assert flat(pieces) == content
        bare = (await server.chat(logprobs=True))["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in bare)
        for wrong in ({"top_logprobs": 5}, {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": -1}):
            assert (await server.chat(400, **wrong))["error"]["param"] == "top_logprobs"


@run_async
async def test_token_ids_and_prompt_logprobs() -> None:
    async with api() as server:
        reply = await server.chat(return_token_ids=True, prompt_logprobs=1, max_tokens=2)
        assert len(reply["prompt_token_ids"]) == 21 and reply["choices"][0]["token_ids"] == [261, 262]
        assert len(reply["prompt_logprobs"]) == 21 and reply["prompt_logprobs"][0] is None
        chunks = await server.stream_chat(return_token_ids=True, max_tokens=2)
        assert [("prompt_token_ids" in chunk) for chunk in chunks] == [True, False, False]
        assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [261], [262]]


def _prompt_of(messages: Any, **body: Any) -> str:
    """The prompt that the engine got."""
    found: list[str] = []

    @run_async
    async def ask() -> None:
        async with api(trust_request_chat_template=True) as server:
            await server.chat(messages=messages, max_tokens=1, **body)
            found.append(server.engine.tokenizer.decode(server.engine.asked[-1].ids))

    ask()
    return found[0]


def test_templates() -> None:
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert _prompt_of(USER) == turn + "<|im_start|>assistant\n"
    assert _prompt_of(USER, add_generation_prompt=False) == turn
    answer = {"role": "assistant", "content": "Yes, "}
    assert _prompt_of([*USER, answer], continue_final_message=True) == turn + "<|im_start|>assistant\nYes, "
    assert _prompt_of(USER, chat_template="{{ messages[0].content }}{{ x }}", chat_template_kwargs={"x": 7}) == "hi7"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in _prompt_of([{"role": "user", "content": parts}])
    # a template that does not know the role gets it as system
    assert _prompt_of([{"role": "developer", "content": "d"}]).startswith("<|im_start|>system\nd")


def test_history_of_tools_and_replies_is_taken_back() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    reply |= {"audio": None, "function_call": None, "reasoning_content": "hm"}
    history = [*USER, reply, {"role": "tool", "tool_call_id": "c1", "content": "r"}]
    assert "<|im_start|>tool\nr<|im_end|>" in _prompt_of(history)
    template = "{{ messages[1].tool_calls[0].function.arguments.k + 1 }}{{ messages[2].tool_call_id }}"
    assert _prompt_of(history, chat_template=template) == "2c1"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": 5, "content": "a"}], "messages[0].role"),
        ([{"role": "usr", "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], "content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "bold": 1}]}], "content[0].bold"),
        ([{"role": "user", "content": "a", "temperature": 1}], "messages[0].temperature"),
        ([{"role": "user", "content": "a", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "arguments"),
        ([{"role": "assistant", "content": "a", "audio": {"id": "x"}}], "messages[0].audio"),
    ],
)
@run_async
async def test_wrong_messages_are_named(messages: Any, param: str) -> None:
    async with api() as server:
        error = (await server.chat(400, messages=messages))["error"]
        assert param in error["param"]
        assert not server.engine.asked


@run_async
async def test_a_template_from_a_request_needs_trust() -> None:
    async with api() as server:
        error = (await server.chat(400, chat_template="{{ 1 }}"))["error"]
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]


@run_async
async def test_tokenize_and_detokenize() -> None:
    async with api() as server:
        reply = await server.post("/tokenize", {"model": "fake", "prompt": "hé", "return_token_strs": True})
        assert reply == {"count": 3, "max_model_len": 1024, "tokens": [104, 195, 169], "token_strs": ["h", "�", "�"]}
        chat = await server.chat(messages=[{"role": "user", "content": "a<|im_end|>b"}], max_tokens=1)
        reply = await server.post("/tokenize", {"messages": [{"role": "user", "content": "a<|im_end|>b"}]})
        assert reply["count"] == chat["usage"]["prompt_tokens"] and reply["token_strs"] is None
        reply = await server.post("/detokenize", {"tokens": [104, 195, 169, 260]})
        assert reply == {"prompt": "hé<|im_end|>"}
        for path, body in (
            ("/tokenize", {"messages": []}),
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": USER}),
            ("/tokenize", {"prompt": "a", "add_generation_prompt": False}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [10**30]}),
            ("/detokenize", {}),
        ):
            assert (await server.post(path, body, 400))["error"]["type"] == "invalid_request_error"
