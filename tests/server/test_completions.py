"""/v1/completions on the FakeEngine: shapes, choices, streams, echo, log-probabilities, usage."""

from __future__ import annotations

import pytest

from tests.fake_engine import TEXT, FakeEngine
from tests.server.helpers import Api, api, finish_reasons, flat, joined, run_async


@run_async
async def test_plain_answer() -> None:
    async with api() as server:
        reply = await server.complete(max_tokens=20)
        assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
        assert reply["model"] == "fake" and isinstance(reply["created"], int) and reply["system_fingerprint"]
        (choice,) = reply["choices"]
        assert choice == {
            "index": 0,
            "text": TEXT,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        assert reply["usage"] == {
            "prompt_tokens": 1,
            "completion_tokens": 7,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@run_async
async def test_default_max_tokens_is_16_or_what_the_context_leaves() -> None:
    async with api(FakeEngine(max_model_len=64, script=False)) as server:
        assert (await server.complete())["usage"]["completion_tokens"] == 16
        assert (await server.complete(prompt="a" * 60))["usage"]["completion_tokens"] == 4
        # asked for, it is not cut silently
        await server.complete(400, prompt="a" * 60, max_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "texts", "tokens"),
    [
        ("ab", ["ab"], 2),
        (["ab", "c"], ["ab", "c"], 3),
        ([97, 98], ["ab"], 2),
        ([[97], [98, 99]], ["a", "bc"], 3),
    ],
)
@run_async
async def test_prompt_shapes(prompt: object, texts: list[str], tokens: int) -> None:
    async with api() as server:
        reply = await server.complete(prompt=prompt, echo=True, max_tokens=2)
        assert [c["text"] for c in reply["choices"]] == [text + "Say ABC" for text in texts]
        assert [c["index"] for c in reply["choices"]] == list(range(len(texts)))
        assert reply["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], None, [1.5], [104, "a"], [[104], "a"], [[104], 5], 7, {}])
@run_async
async def test_wrong_prompts_are_refused(prompt: object) -> None:
    async with api() as server:
        error = (await server.complete(400, prompt=prompt))["error"]
        assert error["type"] == "invalid_request_error" and error["param"].startswith("prompt")
        assert not server.engine.asked  # nothing of a list ran


@pytest.mark.parametrize("ids", [[512], [-1], [5279552648203111001], [10**30], [[104], [512]]])
@run_async
async def test_ids_outside_the_vocabulary_are_named(ids: list) -> None:
    async with api() as server:
        error = (await server.complete(400, prompt=ids))["error"]
        bad = ids[-1][0] if isinstance(ids[-1], list) else ids[-1]
        assert error["param"] == "prompt"
        assert str(bad) in error["message"] or bad == 10**30
        assert not server.engine.asked


@run_async
async def test_n_and_prompts_give_indexed_choices() -> None:
    async with api() as server:
        body = {"prompt": ["a", "b"], "n": 2, "temperature": 1, "seed": 3, "echo": True, "max_tokens": 4}
        reply = await server.complete(**body)
        texts = [c["text"] for c in reply["choices"]]
        assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
        assert [t[0] for t in texts] == ["a", "a", "b", "b"] and texts[0] != texts[1]
        assert reply["usage"]["completion_tokens"] == 16 and reply["usage"]["prompt_tokens"] == 2
        chunks = await server.stream(**body)
        assert [joined(chunks, i) for i in range(4)] == texts
        assert [finish_reasons(chunks, i) for i in range(4)] == [["length"]] * 4


@run_async
async def test_stream_equals_plain() -> None:
    async with api() as server:
        for body in ({"max_tokens": 20}, {"max_tokens": 5}, {"max_tokens": 30, "stop": ["JKL"]}, {"n": 3}):
            plain = await server.complete(**body)
            chunks = await server.stream(**body)
            for choice in plain["choices"]:
                assert joined(chunks, choice["index"]) == choice["text"]
                assert finish_reasons(chunks, choice["index"]) == [choice["finish_reason"]]
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)


@run_async
async def test_held_text_comes_out_at_the_end() -> None:
    async with api() as server:
        chunks = await server.stream(max_tokens=20, stop=["L endless"])
        assert joined(chunks) == TEXT and finish_reasons(chunks) == ["stop"]
        chunks = await server.stream(max_tokens=5, stop=["KLM"])
        assert joined(chunks) == "Say ABCDEFGHIJKL" and finish_reasons(chunks) == ["length"]


@run_async
async def test_stop_reason() -> None:
    async with api() as server:
        for extra, text, reason in (
            ({"stop": "DEF"}, "Say ABC", "DEF"),
            ({"stop": ["DEF"], "include_stop_str_in_output": True}, "Say ABCDEF", "DEF"),
            ({"stop_token_ids": [263]}, "Say ABC", 263),
        ):
            (choice,) = (await server.complete(max_tokens=20, **extra))["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
            chunks = await server.stream(max_tokens=20, **extra)
            assert chunks[-1]["choices"][0]["stop_reason"] == reason


@run_async
async def test_usage_of_streams() -> None:
    async with api() as server:
        chunks = await server.stream(max_tokens=3, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await server.stream(max_tokens=3, stream_options=options)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
        error = (await server.complete(400, stream_options={"include_usage": True}))["error"]
        assert error["param"] == "stream_options"


@run_async
async def test_cached_tokens() -> None:
    async with api() as server:
        body = {"prompt": "a" * 33, "max_tokens": 1}
        assert (await server.complete(**body))["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert (await server.complete(**body))["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        both = await server.complete(prompt=["a" * 33, "a" * 33], max_tokens=1)
        assert both["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


@run_async
async def test_logprobs_and_their_stream() -> None:
    async with api() as server:
        body = {"max_tokens": 20, "logprobs": 1, "stop": ["JKLM"]}
        whole = (await server.complete(**body))["choices"][0]["logprobs"]
        assert whole["tokens"] == ["Say ", "ABC", "DEF", "GHI", "JKL", " end", "</s>"]
        assert whole["token_logprobs"] == [-0.105] * 7
        assert whole["text_offset"] == [0, 4, 7, 10, 13, 16, 20]
        pieces = [chunk["choices"][0]["logprobs"] for chunk in await server.stream(**body)]
        for piece in pieces:
            assert len({len(values) for values in piece.values()}) == 1
        for key, values in whole.items():
            assert flat(piece[key] for piece in pieces) == values
        zero = (await server.complete(max_tokens=4, logprobs=0))["choices"][0]["logprobs"]
        assert zero["top_logprobs"] == [{token: -0.105} for token in zero["tokens"]]


@run_async
async def test_echo_with_logprobs() -> None:
    async with api() as server:
        body = {"prompt": "h\né", "echo": True, "logprobs": 2, "max_tokens": 2}
        (choice,) = (await server.complete(**body))["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == "h\néSay ABC"
        assert logprobs["tokens"] == ["h", "\n", "bytes:\\xc3", "bytes:\\xa9", "Say ", "ABC"]
        assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 7]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        chunks = await server.stream(**body)
        assert joined(chunks) == choice["text"]
        pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert flat(piece["text_offset"] for piece in pieces) == logprobs["text_offset"]
        assert flat(piece["tokens"] for piece in pieces) == logprobs["tokens"]


@run_async
async def test_echo_of_nothing_but_the_prompt() -> None:
    async with api() as server:
        reply = await server.complete(prompt="abc", echo=True, logprobs=1, max_tokens=0)
        (choice,) = reply["choices"]
        assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choice["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 0
        await server.complete(400, max_tokens=0)


@run_async
async def test_prompt_logprobs_and_token_ids() -> None:
    async with api() as server:
        (choice,) = (await server.complete(prompt="ab", prompt_logprobs=2, return_token_ids=True, max_tokens=2))[
            "choices"
        ]
        assert choice["prompt_token_ids"] == [97, 98] and choice["token_ids"] == [261, 262]
        assert choice["prompt_logprobs"] == [
            None,
            {
                "98": {"logprob": -0.105, "rank": 1, "decoded_token": "b"},
                "65": {"logprob": -3.105, "rank": 2, "decoded_token": "A"},
            },
        ]
        chunks = await server.stream(prompt="ab", return_token_ids=True, max_tokens=2)
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[261], [262]]
        assert chunks[0]["choices"][0]["prompt_token_ids"] == [97, 98]
        assert "prompt_token_ids" not in chunks[1]["choices"][0]
        assert (await server.complete(400, prompt_logprobs=1, stream=True))["error"]["param"] == "prompt_logprobs"


@run_async
async def test_truncated_prompt() -> None:
    async with api() as server:
        reply = await server.complete(prompt="a" * 2000 + "bc", truncate_prompt_tokens=2, echo=True, max_tokens=1)
        assert reply["usage"]["prompt_tokens"] == 2 and reply["choices"][0]["text"] == "bcSay "


@run_async
async def test_many_streams_equal_plain_answers() -> None:
    import asyncio

    async with api(FakeEngine(script=False)) as server:
        bodies = [{"prompt": f"p{i}", "max_tokens": 48} for i in range(64)]
        streams = await asyncio.gather(*(server.stream(**body) for body in bodies))
        for body, chunks in zip(bodies, streams, strict=True):
            assert joined(chunks) == (await server.complete(**body))["choices"][0]["text"]


@run_async
async def test_model_names() -> None:
    async with api(served_model_names=("one", "two")) as server:
        assert (await server.complete(model="two"))["model"] == "two"
        assert (await server.complete(model=None))["model"] == "one"
        error = (await server.complete(404, model="fake"))["error"]
        assert error["code"] == "model_not_found" and error["param"] == "model"
        await _check_models(server)


async def _check_models(server: Api) -> None:
    async with server.http.get("/v1/models") as response:
        listed = await response.json()
    assert [card["id"] for card in listed["data"]] == ["one", "two"] and listed["object"] == "list"
    assert listed["data"][0]["max_model_len"] == 1024
    async with server.http.get("/v1/models/two") as response:
        assert (await response.json())["id"] == "two"
    async with server.http.get("/v1/models/three") as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
