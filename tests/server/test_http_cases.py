"""Requests that have broken other LLM servers, sent to ``lmjax serve`` on tiny models (``http_cases.jsonl``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.http_checks import CHECKS, Run, apply, send_case
from tests.server.live_server import Servers

# a start compiles some thirty programs, the first time and on a busy machine that takes minutes
pytestmark = pytest.mark.timeout(900)

CASES = [json.loads(line) for line in (Path(__file__).parent / "http_cases.jsonl").read_text().splitlines()]
# the set-up in words -> flags of the command line
FLAGS: dict[str, tuple[str, ...]] = {
    "": (),
    "prefill chunk 16": ("--long-prefill-token-threshold", "16"),
    "prefix caching on, block 16": (),  # the defaults
    "API key sk-test set": ("--api-key", "sk-test"),
    "KV pool 8 blocks of 16": ("--num-gpu-blocks-override", "8", "--block-size", "16"),
}


def setup_of(case: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    return case.get("fixture", "ALPHA"), FLAGS[case.get("flags", "")]


CASES.sort(key=setup_of)  # stable: one server after the other


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any], servers: Servers) -> None:
    fixture, flags = setup_of(case)
    server = servers.get(fixture, flags)
    assert server.known_text
    if "sk-test" in flags and "headers" not in case:
        case = case | {"headers": {}}  # these cases bring no key
    run = Run(case, server, send_case(case, server))
    expected = case["expect"]["status"]
    allowed = expected if isinstance(expected, list) else [expected]
    for reply in run.replies:
        assert reply.status in allowed, reply.body[:500]
    for words in case["expect"]["checks"]:
        apply(words, run)


def test_every_check_is_used() -> None:
    """A check that no case names any more is dead code."""
    words = [w for case in CASES for w in case["expect"]["checks"]]
    bare = [w.split(": ", 1)[1] if w.startswith("if ") else w for w in words]
    for pattern, _ in CHECKS:
        assert any(pattern.fullmatch(w) for w in bare), pattern.pattern
