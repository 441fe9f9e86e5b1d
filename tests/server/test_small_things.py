"""Kinds of fault that a first user found: numbers out of range without a name, a live socket taken away."""

from __future__ import annotations

import socket

import pytest

from server.errors import ApiError
from server.fields import COMPLETION
from server.lifecycle import _clear_stale_socket
from server.schema import CompletionRequest, decode


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("temperature", "1e400"),
        ("logit_bias", '{"1": 1e999}'),
        ("max_tokens", "9" * 5000),
    ],
)
def test_a_number_out_of_range_is_named(field, text):
    body = f'{{"prompt": "a", "top_p": 0.5, "{field}": {text}}}'.encode()
    with pytest.raises(ApiError) as caught:
        decode(body, COMPLETION, CompletionRequest)
    assert caught.value.status == 400 and caught.value.param.startswith(field)
    assert field in caught.value.message


def test_a_socket_in_use_is_left_alone_and_a_stale_one_goes(tmp_path):
    path = str(tmp_path / "s.sock")
    _clear_stale_socket(path)  # nothing there
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        with pytest.raises(OSError, match="in use"):
            _clear_stale_socket(path)
    assert (tmp_path / "s.sock").is_socket()
    _clear_stale_socket(path)
    assert not (tmp_path / "s.sock").exists()
