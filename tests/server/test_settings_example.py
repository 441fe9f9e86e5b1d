"""The command that a ready server suggests."""

from __future__ import annotations

import shlex

import pytest

from lmjax.protocol import PoolingInfo
from server.settings import ServerSettings
from tests.fake_engine import FakeEngine


def test_example_names_a_host_that_can_be_called():
    words = shlex.split(ServerSettings(host="0.0.0.0", port=8001).example)
    assert words[:2] == ["curl", "http://localhost:8001/v1/chat/completions"]
    assert not any("Bearer" in word for word in words)


def test_example_for_a_socket_and_keys_shows_no_key():
    example = ServerSettings(uds="/run/lm.sock", api_keys=("sk-secret",)).example
    assert "--unix-socket /run/lm.sock http://localhost/v1" in example
    assert "Bearer KEY" in example and "sk-secret" not in example


@pytest.mark.parametrize(
    ("task", "generates", "route"),
    [("embed", True, "chat/completions"), ("embed", False, "embeddings"), ("score", False, "rerank")],
)
def test_example_is_one_that_the_engine_can_answer(task, generates, route):
    info = FakeEngine(pooling=PoolingInfo(task, "last", True, 4), generates=generates).info
    assert f"/v1/{route} " in ServerSettings().example_for(info)
