"""The table of request fields: every row is held to what it says.

An applied field needs a probe: a request in which it changes what the engine is asked or what is answered. Hints are
the closed list of docs/server.md. A new row without a probe, or a probe without a row, fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmjax.types import SamplingParams
from server.fields import CHAT, COMPLETION, DETOKENIZE, FIELDS, TOKENIZE
from server.schema import STRUCTS
from tests.fake_engine import FakeEngine
from tests.server.helpers import USER, Api, api, events, joined, run_async

PATHS = {
    COMPLETION: "/v1/completions",
    CHAT: "/v1/chat/completions",
    TOKENIZE: "/tokenize",
    DETOKENIZE: "/detokenize",
}
BASE: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": "fake", "prompt": "x", "max_tokens": 4},
    CHAT: {"model": "fake", "messages": USER, "max_tokens": 4},
    TOKENIZE: {"model": "fake", "messages": USER},
    DETOKENIZE: {"model": "fake", "tokens": [97]},
}
HINTS = {
    COMPLETION: {"user", "safety_identifier", "metadata", "service_tier", "prompt_cache_key"},
    CHAT: {
        *("user", "safety_identifier", "metadata", "service_tier", "prompt_cache_key"),
        *("store", "parallel_tool_calls", "prediction"),
    },
    TOKENIZE: set(),
    DETOKENIZE: set(),
}
HINT_VALUES: dict[str, Any] = {
    "user": "u",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "store": True,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
}

# Sampling fields: the engine is asked with this value. What an engine does with it is tested on real models.
SAMPLING: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 11,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.25,
    "allowed_token_ids": [97, 98],
    "bad_words": ["bad"],
    "stop": ["DEF"],
    "stop_token_ids": [263],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}
Probe = Callable[[Api, str], Any]
PROBES: dict[str, Probe] = {}


def probe(*names: str) -> Callable[[Probe], Probe]:
    def register(function: Probe) -> Probe:
        PROBES.update(dict.fromkeys(names, function))
        return function

    return register


async def ask(server: Api, route: str, status: int = 200, **body: Any) -> dict[str, Any]:
    return await server.post(PATHS[route], {k: v for k, v in (BASE[route] | body).items() if v is not ...}, status)


def asked(server: Api) -> SamplingParams:
    return server.engine.asked[-1].params


def probe_sampling(name: str) -> Probe:
    async def check(server: Api, route: str) -> None:
        value = SAMPLING[name]
        await ask(server, route)
        assert getattr(asked(server), name) != value
        await ask(server, route, **{name: value})
        assert getattr(asked(server), name) == value

    return check


@probe("model")
async def _(server: Api, route: str) -> None:
    await ask(server, route, model="other", status=404)


@probe("stream")
async def _(server: Api, route: str) -> None:
    async with server.http.post(PATHS[route], json=BASE[route] | {"stream": True}) as response:
        assert len(events(await response.text())) > 1


@probe("stream_options")
async def _(server: Api, route: str) -> None:
    body = BASE[route] | {"stream": True, "stream_options": {"include_usage": True}}
    async with server.http.post(PATHS[route], json=body) as response:
        assert events(await response.text())[-1]["usage"]["total_tokens"] > 0


@probe("logit_bias")
async def _(server: Api, route: str) -> None:
    await ask(server, route, logit_bias={"97": -100, "98": 1.5})
    assert asked(server).logit_bias == {97: -100, 98: 1.5}


@probe("max_tokens", "max_completion_tokens")
async def _(server: Api, route: str) -> None:
    for body in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        assert (await ask(server, route, **body))["usage"]["completion_tokens"] == 2


@probe("logprobs")
async def _(server: Api, route: str) -> None:
    assert (await ask(server, route))["choices"][0]["logprobs"] is None
    reply = await ask(server, route, logprobs=True if route == CHAT else 2)
    assert reply["choices"][0]["logprobs"] is not None


@probe("top_logprobs")
async def _(server: Api, route: str) -> None:
    reply = await ask(server, route, logprobs=True, top_logprobs=3)
    assert len(reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3


@probe("truncate_prompt_tokens")
async def _(server: Api, route: str) -> None:
    await ask(server, route, truncate_prompt_tokens=1)
    assert len(server.engine.asked[-1].ids) == 1


@probe("priority")
async def _(server: Api, route: str) -> None:
    await ask(server, route, priority=-5)
    assert server.engine.asked[-1].priority == -5
    async with api() as fcfs:  # where it would be ignored, it is refused
        await ask(fcfs, route, priority=1, status=400)


@probe("request_id")
async def _(server: Api, route: str) -> None:
    assert (await ask(server, route, request_id="mine"))["id"].endswith("-mine")
    assert "mine" not in (server.engine.asked[-1].request_id or "")
    await ask(server, route, request_id="a\nb", status=400)


@probe("cache_salt")
async def _(server: Api, route: str) -> None:
    await ask(server, route, cache_salt="salt")
    assert server.engine.asked[-1].cache_salt == "salt"


@probe("add_special_tokens")
async def _(server: Api, route: str) -> None:
    calls = []
    encode = server.engine.tokenizer.encode
    server.engine.tokenizer.encode = lambda text, add_special_tokens: calls.append(add_special_tokens) or encode(text)
    for value in (True, False):
        await ask(server, route, add_special_tokens=value)
        if route == TOKENIZE:
            await ask(server, route, add_special_tokens=value, messages=..., prompt="x")
    assert calls == ([True, True, False, False] if route == TOKENIZE else [True, False])


@probe("return_token_ids")
async def _(server: Api, route: str) -> None:
    assert len((await ask(server, route, return_token_ids=True))["choices"][0]["token_ids"]) == 4


@probe("prompt")
async def _(server: Api, route: str) -> None:
    if route == TOKENIZE:
        assert (await ask(server, route, messages=..., prompt="ab"))["tokens"] == [97, 98]
    else:
        await ask(server, route, prompt="ab")
        assert server.engine.asked[-1].ids == [97, 98]


@probe("echo")
async def _(server: Api, route: str) -> None:
    assert (await ask(server, route, prompt="ab", echo=True))["choices"][0]["text"].startswith("ab")


@probe("best_of")
async def _(server: Api, route: str) -> None:
    await ask(server, route, n=2, best_of=2)
    await ask(server, route, n=2, best_of=1, status=400)
    await ask(server, route, best_of=3, status=400)


async def prompt_tokens(server: Api, route: str, **body: Any) -> int:
    reply = await ask(server, route, **body)
    return reply["count"] if route == TOKENIZE else reply["usage"]["prompt_tokens"]


@probe("messages")
async def _(server: Api, route: str) -> None:
    long = [{"role": "user", "content": "hello"}]
    assert await prompt_tokens(server, route, messages=long) == await prompt_tokens(server, route) + 3


@probe("add_generation_prompt")
async def _(server: Api, route: str) -> None:
    assert await prompt_tokens(server, route, add_generation_prompt=False) == await prompt_tokens(server, route) - 11


@probe("continue_final_message")
async def _(server: Api, route: str) -> None:
    # neither the turn's end (2 tokens) nor the start of the next one (11)
    assert await prompt_tokens(server, route, continue_final_message=True) == await prompt_tokens(server, route) - 13
    await ask(server, route, continue_final_message=True, add_generation_prompt=True, status=400)


@probe("chat_template", "chat_template_kwargs")
async def _(server: Api, route: str) -> None:
    template = "{{ thing }}"
    body = {"chat_template": template, "chat_template_kwargs": {"thing": "abc"}}
    assert await prompt_tokens(server, route, **body) == 3


@probe("return_token_strs")
async def _(server: Api, route: str) -> None:
    assert (await ask(server, route, messages=..., prompt="ab", return_token_strs=True))["token_strs"] == ["a", "b"]


@probe("tokens")
async def _(server: Api, route: str) -> None:
    assert (await ask(server, route, tokens=[98, 97]))["prompt"] == "ba"


PROBES |= {name: probe_sampling(name) for name in SAMPLING}
# the other routes: test_admin.py, test_embeddings.py
ROWS = [(route, name) for route, table in FIELDS.items() for name in table if route in HINTS]


@pytest.mark.parametrize(("route", "name"), ROWS, ids=[f"{route}-{name}" for route, name in ROWS])
@run_async
async def test_row(route: str, name: str) -> None:
    field = FIELDS[route][name]
    async with api(FakeEngine(), trust_request_chat_template=True, scheduling_policy="priority") as server:
        # a fresh tokenizer object would cost time, so probes that patch it get it back
        encode = server.engine.tokenizer.encode
        try:
            if field.kind == "applied":
                assert name in PROBES, f"{name} is said to be applied, but no probe shows it"
                await PROBES[name](server, route)
            elif field.kind == "hint":
                await check_hint(server, route, name)
            else:
                await check_refused(server, route, name)
            if name not in ("prompt", "messages", "tokens"):
                await ask(server, route, **{name: None})  # null is absent
        finally:
            server.engine.tokenizer.__dict__.pop("encode", None)
            assert server.engine.tokenizer.encode == encode


async def check_hint(server: Api, route: str, name: str) -> None:
    assert name in HINTS[route], f"{name} is no documented hint"
    plain = await ask(server, route, temperature=0)
    hinted = await ask(server, route, temperature=0, **{name: HINT_VALUES[name]})
    assert hinted["choices"] == plain["choices"]
    wrong = 5 if name != "service_tier" else "priority"
    error = (await ask(server, route, **{name: wrong}, status=400))["error"]
    assert error["param"] == name


async def check_refused(server: Api, route: str, name: str) -> None:
    field = FIELDS[route][name]
    for value in field.neutral:
        await ask(server, route, **{name: value})
    for value in ([{"a": 1}], "something", 7, True, {"type": "json_object"}):
        error = (await ask(server, route, **{name: value}, status=400))["error"]
        assert error["param"] == name and error["code"] == "unsupported"
        assert field.reason in error["message"] and len(field.reason) > 10


def test_structs_and_table_agree() -> None:
    for route, struct in STRUCTS.items():
        applied = {name for name, field in FIELDS[route].items() if field.kind == "applied"}
        assert {field.name for field in msgspec.structs.fields(struct)} == applied


def test_every_sampling_parameter_is_in_the_table() -> None:
    names = set(SamplingParams.__dataclass_fields__)
    for route in (COMPLETION, CHAT):
        assert names <= {name for name, field in FIELDS[route].items() if field.kind == "applied"}


def test_hints_are_the_documented_ones() -> None:
    for route, hints in HINTS.items():
        assert {name for name, field in FIELDS[route].items() if field.kind == "hint"} == hints
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page[page.index("## Hints") :].split("\n## ")[0]))
    assert HINTS[CHAT] <= documented


@run_async
async def test_unknown_fields_are_named_with_a_near_miss() -> None:
    async with api() as server:
        for route, name, near in (
            (COMPLETION, "max_token", "max_tokens"),
            (CHAT, "Temperature", "temperature"),
            (CHAT, "prompt_logprob", "prompt_logprobs"),
            (TOKENIZE, "promt", "prompt"),
        ):
            error = (await ask(server, route, **{name: 1}, status=400))["error"]
            assert error["param"] == name and error["code"] == "unknown_field"
            assert f"did you mean '{near}'" in error["message"]
        error = (await ask(server, CHAT, not_a_field=1, status=400))["error"]
        assert "not_a_field" in error["message"] and "did you mean" not in error["message"]
        error = (await ask(server, CHAT, **{"x" * 100_000: 1}, status=400))["error"]
        assert len(error["message"]) < 200


@run_async
async def test_the_models_own_sampling_defaults_fill_what_is_open() -> None:
    engine = FakeEngine(default_sampling={"temperature": 0.25, "top_p": 0.5})
    async with api(engine) as server:
        await ask(server, COMPLETION, top_p=0.75)
        assert (asked(server).temperature, asked(server).top_p) == (0.25, 0.75)
        await ask(server, CHAT)
        assert (asked(server).temperature, asked(server).top_p) == (0.25, 0.5)
    async with api() as server:
        await ask(server, CHAT)
        assert (asked(server).temperature, asked(server).top_p) == (1.0, 1.0)


@run_async
async def test_stream_options_are_strict() -> None:
    async with api() as server:
        chunks = await server.stream(stream_options={"include_usage": None, "include_obfuscation": False})
        assert joined(chunks) and "usage" not in chunks[0]
        for options in (
            {"include_usage": "yes"},
            {"usage": True},
            {"include_obfuscation": True},
            {"continuous_usage_stats": True},
            [],
        ):
            body = BASE[COMPLETION] | {"stream": True, "stream_options": options}
            error = (await server.post("/v1/completions", body, 400))["error"]
            assert error["param"].startswith("stream_options")
