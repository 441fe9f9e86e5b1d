"""The checks of ``http_cases.jsonl``: each kind in words there is one function here; unknown words fail the test."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.server.live_server import LiveServer, Reply


@dataclass
class Run:
    """One case that was sent: its replies in the order of ``$I``."""

    case: dict[str, Any]
    server: LiveServer
    replies: list[Reply]

    @property
    def reply(self) -> Reply:
        return self.replies[0]

    def body(self, i: int = 0, **changes: Any) -> Any:
        body = expand(self.case["body"], self.server.fixture, i) | changes
        return {key: value for key, value in body.items() if value is not ...}

    def alone(self, i: int = 0, **changes: Any) -> Reply:
        """The same request again, with nothing beside it. ``...`` takes a field away."""
        return self.server.send(self.case["method"], self.case["path"], self.body(i, **changes))

    def plainly(self, i: int = 0) -> Reply:
        return self.alone(i, stream=..., stream_options=...)


Check = Callable[..., None]
CHECKS: list[tuple[re.Pattern[str], Check]] = []


def check(pattern: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS.append((re.compile(pattern), function))
        return function

    return register


def apply(words: str, run: Run) -> None:
    """Runs the check that ``words`` name; the groups of its pattern are its arguments."""
    conditional = re.fullmatch(r"if (\d+): (.*)", words)
    if conditional:
        if run.reply.status != int(conditional[1]):
            return
        words = conditional[2]
    found = [(match, function) for pattern, function in CHECKS if (match := pattern.fullmatch(words))]
    assert len(found) == 1, f"{len(found)} checks know the words {words!r}"
    match, function = found[0]
    function(run, *match.groups())


# --- sending ------------------------------------------------------------------------------------------------------


def expand(value: Any, model: str, i: int) -> Any:
    """``$MODEL``, ``$I``, ``{"$repeat": [text, n]}`` and ``{"$list": [value, n]}`` (``$I`` counts inside)."""
    if isinstance(value, str):
        return value.replace("$MODEL", model).replace("$I", str(i))
    if isinstance(value, list):
        return [expand(item, model, i) for item in value]
    if not isinstance(value, dict):
        return value
    if "$repeat" in value:
        text, count = value["$repeat"]
        return text * count
    if "$list" in value:
        item, count = value["$list"]
        return [expand(item, model, k) for k in range(count)]
    return {key: expand(item, model, i) for key, item in value.items()}


def raw_body(case: dict[str, Any], model: str, i: int) -> Any:
    if "body_hex" in case:
        return bytes.fromhex(case["body_hex"])
    if "body_raw" in case:
        return expand(case["body_raw"], model, i).encode()
    return expand(case["body"], model, i)


def send_case(case: dict[str, Any], server: LiveServer) -> list[Reply]:
    """As often as it says, at once unless it is sequential, with its neighbours if it has some."""

    def send(i: int) -> Reply:
        body = raw_body(case, server.fixture, i)
        return server.send(case["method"], case["path"], body, case.get("headers"))

    times = range(case.get("times", 1))
    if case.get("sequential"):
        return [send(i) for i in times]
    with Neighbours(case, server):
        return at_once(send, times)


def at_once(send: Callable[[Any], Reply], items: Sequence[Any]) -> list[Reply]:
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        return list(pool.map(send, items))


class Neighbours:
    """Other requests that run beside a case, every second one with each of the two penalties."""

    def __init__(self, case: dict[str, Any], server: LiveServer):
        self._stop = threading.Event()
        self._server = server
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(case.get("neighbours", 0))]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, i: int) -> None:
        penalty = {"repetition_penalty": 2} if i % 2 else {"frequency_penalty": 2}
        while not self._stop.is_set():
            reply = self._server.complete(prompt=f"hello{i}", max_tokens=24, ignore_eos=True, **penalty)
            assert reply.status == 200


# --- any answer ---------------------------------------------------------------------------------------------------


@check("ERR")
def _(run: Run) -> None:
    error = run.reply.json["error"]
    assert error["message"] and error["type"] and error["code"] and "param" in error
    assert b"Traceback" not in run.reply.body


@check("error body is JSON")
def _(run: Run) -> None:
    assert run.reply.json["error"]["message"]


@check("error body < 8 kB")
def _(run: Run) -> None:
    assert len(run.reply.body) < 8192


@check(r"error.message mentions (\w+)")
def _(run: Run, word: str) -> None:
    assert word in run.reply.json["error"]["message"]


@check("ALIVE")
def _(run: Run) -> None:
    run.server.check_alive()


@check(r"answered within (\d+) s")
def _(run: Run, seconds: str) -> None:
    assert all(reply.seconds < int(seconds) for reply in run.replies)


@check("SSE")
def _(run: Run) -> None:
    for reply in run.replies:
        assert reply.is_stream and reply.events  # parsed: every event is JSON, the last one is [DONE]
        for index in reply.indices:
            reasons = [c["finish_reason"] for c in reply.choices(index) if c["finish_reason"]]
            assert len(reasons) == 1 and reply.choices(index)[-1]["finish_reason"]


# --- texts --------------------------------------------------------------------------------------------------------


@check(r'(?:joined text|json choices\[0\]\.text) == "(.*)"')
def _(run: Run, text: str) -> None:
    assert run.reply.text() == text


@check(r'json choices\[0\]\.text startswith "(.*)"')
def _(run: Run, text: str) -> None:
    assert run.reply.text().startswith(text)


@check("text has none of the stops")
def _(run: Run) -> None:
    assert not any(stop in run.reply.text() for stop in run.body()["stop"])


@check('choices with index 0,1 start "a"; 2,3 start "b"')
def _(run: Run) -> None:
    assert [text[0] for text in run.reply.texts] == ["a", "a", "b", "b"]


@check("index 0/1/2 joined text starts with a/b/c")
def _(run: Run) -> None:
    assert [text[0] for text in run.reply.texts] == ["a", "b", "c"]


@check("not all texts equal")
def _(run: Run) -> None:
    assert len(set(run.reply.texts)) > 1


@check("2 equal choices")
def _(run: Run) -> None:
    assert len(run.reply.texts) == 2 and len(set(run.reply.texts)) == 1


@check(r"with times=64 concurrent: every joined text == the same request sent alone without stream")
def _(run: Run) -> None:
    assert len(run.replies) == 64
    for i, reply in enumerate(run.replies):
        alone = run.plainly(i)
        assert reply.text() == alone.text() and reply.usage == alone.usage | {
            "prompt_tokens_details": reply.usage["prompt_tokens_details"]
        }
    assert len({reply.text() for reply in run.replies}) > 32


@check("with times=2 concurrent, different prompts: each 200 answer equals its lone answer")
def _(run: Run) -> None:
    assert len(run.replies) == 2
    for i, reply in enumerate(run.replies):
        if reply.status == 200:
            assert reply.text() == run.alone(i).text()


@check("with times=20 concurrent: all bodies have the same texts")
def _(run: Run) -> None:
    assert len(run.replies) == 20 and all(reply.texts == run.reply.texts for reply in run.replies)


@check("with times=2 in order: same text")
def _(run: Run) -> None:
    first, second = run.replies
    assert first.text() == second.text()


@check(
    r"with 9 concurrent neighbours using repetition_penalty 2 / frequency_penalty 2: text == text when alone",
)
def _(run: Run) -> None:
    assert run.case["neighbours"] == 9
    assert run.reply.text() == run.alone().text()


@check(r"text == text without the penalty \(first token\)")
def _(run: Run) -> None:
    assert run.reply.text() == run.alone(presence_penalty=...).text()


@check("with times=8 concurrent, body.logprobs dropped for even ones: all 200, same text as alone")
def _(run: Run) -> None:
    def send(i: int) -> Reply:
        dropped = {"logprobs": ..., "top_logprobs": ...} if i % 2 == 0 else {}
        length = {"max_tokens": 1 + 5 * i}  # 1 to 36 tokens
        return run.alone(i, **dropped, **length)

    for round_ in range(3):
        replies = at_once(send, range(8))
        assert all(reply.status == 200 for reply in replies)
        for i, reply in enumerate(replies):
            assert (reply.json["choices"][0]["logprobs"] is None) == (i % 2 == 0)
            if round_ == 0:
                assert reply.text() == run.alone(i, max_tokens=1 + 5 * i).text()
    assert run.server.metrics()["compiles_total"] == 0


# --- counts and reasons -------------------------------------------------------------------------------------------


@check(r"usage\.(\w+) == (\d+)")
def _(run: Run, name: str, count: str) -> None:
    assert all(reply.usage[name] == int(count) for reply in run.replies)


@check(r"usage\.(\w+) in \[(\d+), (\d+)\]")
def _(run: Run, name: str, low: str, high: str) -> None:
    assert run.reply.usage[name] in (int(low), int(high))


@check(r"finish_reason (?:== )?\"?(\w+)\"?")
def _(run: Run, reason: str) -> None:
    assert run.reply.finish_reason() == reason


@check(r"len\(choices\) == (\d+)(?:, indices 0\.\.3)?")
def _(run: Run, count: str) -> None:
    for reply in run.replies:
        assert len(reply.json["choices"]) == int(count) and reply.indices == list(range(int(count)))


@check(r"indices seen == \{0,1,2\}")
def _(run: Run) -> None:
    assert run.reply.indices == [0, 1, 2]


@check("one usage chunk; completion_tokens == sum over choices")
def _(run: Run) -> None:
    assert sum(1 for event in run.reply.events if event.get("usage")) == 1
    tokens = sum(len(run.reply.logprobs("tokens", index)) for index in run.reply.indices)
    assert run.reply.usage["completion_tokens"] == tokens
    plain = run.plainly()
    assert plain.texts == run.reply.texts and plain.usage["completion_tokens"] == tokens


@check(r"second usage\.prompt_tokens_details\.cached_tokens in \[16, 31\] if reported")
def _(run: Run) -> None:
    assert run.replies[1].usage["prompt_tokens_details"]["cached_tokens"] in (16, 31)


@check(r"usage\.prompt_tokens is 51 \(literal\) or 31 \(parsed\), and /tokenize agrees")
def _(run: Run) -> None:
    count = run.reply.usage["prompt_tokens"]
    assert count in (51, 31)
    messages = {"messages": run.body()["messages"]}
    assert run.server.send("POST", "/tokenize", messages).json["count"] == count


# --- log-probabilities --------------------------------------------------------------------------------------------


def without_eos(tokens: list[str]) -> list[str]:
    return tokens[:-1] if tokens and tokens[-1] == "</s>" else tokens


@check(r"joined logprobs\.tokens == (\[.*\]) \(a final EOS entry is allowed\)")
def _(run: Run, tokens: str) -> None:
    assert without_eos(run.reply.logprobs("tokens")) == json.loads(tokens)
    plain = run.plainly()
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert run.reply.logprobs(key) == plain.logprobs(key)


@check(r"each joined token_logprob within 0\.01 of -0\.105")
def _(run: Run) -> None:
    values = run.reply.logprobs("token_logprobs")
    assert values and all(abs(value + 0.105) < 0.01 for value in values)


@check("in each chunk tokens, token_logprobs, top_logprobs, text_offset have equal length")
def _(run: Run) -> None:
    for choice in run.reply.choices():
        assert len({len(values) for values in choice["logprobs"].values()}) == 1


@check(r"joined bytes of logprobs\.content == utf-8 of message\.content \(a final EOS entry is allowed\)")
def _(run: Run) -> None:
    entries = run.reply.logprobs("content")
    if entries[-1]["token"] == "</s>":
        entries = entries[:-1]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == run.reply.text().encode()


@check("each top_logprobs has 2 entries, sorted downwards")
def _(run: Run) -> None:
    for entry in run.reply.logprobs("content"):
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 2 and values == sorted(values, reverse=True)


@check(r"(?:json )?len\((tokens|token_logprobs)\) == (\d+)(?: \(.*\))?")
def _(run: Run, key: str, count: str) -> None:
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(run.reply.logprobs(name)) == int(count), (key, name)


@check("text_offset is non-decreasing from 0")
def _(run: Run) -> None:
    offsets = run.reply.logprobs("text_offset")
    assert offsets[0] == 0 and offsets == sorted(offsets)


@check(r"token_logprobs\[0\] is null(, all others are numbers < 0)?")
def _(run: Run, others: str | None) -> None:
    values = run.reply.logprobs("token_logprobs")
    assert values[0] is None and run.reply.logprobs("top_logprobs")[0] is None
    assert all(isinstance(value, float) and value < 0 for value in values[1:])


@check(r"choices\[0\]\.logprobs is not null")
def _(run: Run) -> None:
    assert run.reply.json["choices"][0]["logprobs"] is not None


@check("per index: joined tokens count == joined token_logprobs count")
def _(run: Run) -> None:
    for index in run.reply.indices:
        tokens, values = (run.reply.logprobs(key, index) for key in ("tokens", "token_logprobs"))
        assert 0 < len(tokens) == len(values) <= 12


@check("with times=2 in order: both bodies have equal logprobs")
def _(run: Run) -> None:
    first, second = run.replies
    assert first.logprobs("tokens") == second.logprobs("tokens") and first.text() == second.text()
    for one, other in zip(first.logprobs("token_logprobs"), second.logprobs("token_logprobs"), strict=True):
        assert one is other is None or abs(one - other) < 1e-4


@check(r"content entries == completion_tokens \(EOS may be left out\)")
def _(run: Run) -> None:
    for reply in run.replies:
        missing = reply.usage["completion_tokens"] - len(reply.logprobs("content"))
        assert missing in (0, 1) and (missing == 0 or reply.finish_reason() == "stop")
