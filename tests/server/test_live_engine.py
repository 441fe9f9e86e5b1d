"""``lmjax serve`` with a real tiny model: fields change answers, cut streams free their blocks, readers may be slow."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import events, joined
from tests.server.http_checks import at_once
from tests.server.live_server import LiveServer, Reply, Servers

pytestmark = pytest.mark.timeout(900)
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture
def server(servers: Servers) -> LiveServer:
    return servers.get("RAND", ())


def answer(server: LiveServer, **body: Any) -> Reply:
    reply = server.complete(**({"prompt": "hello", "max_tokens": 24, "ignore_eos": True} | body))
    assert reply.status == 200, reply.body[:300]
    return reply


def ids(reply: Reply) -> list[int]:
    return reply.json["choices"][0]["token_ids"]


def test_sampling_fields_change_the_answer(server: LiveServer) -> None:
    greedy = answer(server, return_token_ids=True)
    text = greedy.text()
    sampled = answer(server, **SAMPLED).text()
    assert sampled != text and answer(server, **SAMPLED).text() == sampled
    assert answer(server, temperature=1.0, seed=4).text() != sampled
    for only_the_best in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert answer(server, **(SAMPLED | only_the_best)).text() == text
    for changed in ({"repetition_penalty": 5.0}, {"frequency_penalty": 2.0, "max_tokens": 200}):
        assert answer(server, **changed).text() != answer(server, max_tokens=changed.get("max_tokens", 24)).text()
    first, second = ids(greedy)[:2]
    assert ids(answer(server, logit_bias={str(first): -100}, return_token_ids=True))[0] != first
    assert set(ids(answer(server, allowed_token_ids=[97, 98], return_token_ids=True))) <= {97, 98}
    stopped = answer(server, stop_token_ids=[second], return_token_ids=True)
    assert ids(stopped) == [first, second] and stopped.json["choices"][0]["stop_reason"] == second
    assert len(ids(answer(server, stop_token_ids=[second], min_tokens=9, return_token_ids=True))) >= 9


def test_bad_words_and_presence_penalty(server: LiveServer) -> None:
    text = answer(server, allowed_token_ids=list(range(97, 123))).text()
    letters = {"allowed_token_ids": list(range(97, 123))}
    assert text[0] not in answer(server, bad_words=[text[0]], **letters).text()
    repeated = answer(server, allowed_token_ids=[97, 98, 99, 100], max_tokens=4).text()
    spread = answer(server, allowed_token_ids=[97, 98, 99, 100], max_tokens=4, presence_penalty=2.0).text()
    assert len(set(spread)) >= len(set(repeated))


def test_salted_caches_are_apart(server: LiveServer) -> None:
    def cached(**body: Any) -> int:
        reply = answer(server, prompt="s" * 40, max_tokens=1, **body)
        return reply.usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() == 32
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") == 32 and cached(cache_salt="b") == 0


# --- streams that end early ---------------------------------------------------------------------------------------


class RawStream:
    """A stream on a bare socket, so that closing it and reading slowly are exact."""

    def __init__(self, server: LiveServer, **body: Any):
        body = {"model": server.fixture, "temperature": 0, "ignore_eos": True, "stream": True} | body
        data = json.dumps(body).encode()
        self.sock = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.sock.sendall(head.encode() + data)

    def wait_first(self) -> None:
        self.sock.settimeout(60)
        assert self.sock.recv(1, socket.MSG_PEEK)

    def read(self, size: int = 65536) -> bytes:
        return self.sock.recv(size)

    def rest(self, begin: bytes = b"") -> str:
        self.sock.settimeout(120)
        parts = [begin]
        while part := self.read():
            parts.append(part)
        self.sock.close()
        return joined(events(b"".join(parts).partition(b"\r\n\r\n")[2].decode()))

    def close(self) -> None:
        # an immediate reset: nothing lingers in the kernel
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.sock.close()


def fresh(server: LiveServer, keys: tuple[str, ...] = ("steps_total", "generation_tokens_total")) -> dict[str, float]:
    """The numbers of a snapshot that has just been made."""
    old = server.metrics()
    while (new := server.metrics())["steps_total"] == old["steps_total"]:
        time.sleep(0.001)
    return new


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_cut_streams_stop_at_once_and_free_their_blocks(server: LiveServer) -> None:
    streams = [RawStream(server, prompt=f"c{i}", max_tokens=800) for i in range(4)]
    for stream in streams:
        stream.wait_first()
    before, start = fresh(server), time.monotonic()
    assert before["num_requests_running"] == 4
    for stream in streams[:2]:
        stream.close()
    time.sleep(0.3)
    after, seconds = fresh(server), time.monotonic() - start
    # of the steps between the snapshots, those in which the two still took part: at most two from the abort on, and
    # those that passed while the snapshot came here and the abort went there
    steps = after["steps_total"] - before["steps_total"]
    extra = (after["generation_tokens_total"] - before["generation_tokens_total"] - 2 * steps) / 2
    allowed = 2 + 0.1 * steps / seconds
    assert extra <= allowed < steps
    assert after["num_requests_running"] == 2
    length = after["generation_tokens_total"] / 2  # an upper bound of what the two hold
    assert after["kv_cache_usage_perc"] * 256 <= 2 * (length / 16 + 2)
    for stream in streams[2:]:
        stream.close()
    until(lambda: server.metrics()["kv_cache_usage_perc"] == 0, 5)
    assert server.metrics()["compiles_total"] == 0


def test_half_of_64_streams_are_cut(server: LiveServer) -> None:
    streams = [RawStream(server, prompt=f"h{i}", max_tokens=40) for i in range(64)]
    streams[0].wait_first()
    for stream in streams[1::2]:
        stream.close()
    texts = [stream.rest() for stream in streams[::2]]
    until(lambda: server.metrics()["kv_cache_usage_perc"] == 0, 5)
    alone = at_once(lambda i: answer(server, prompt=f"h{i}", max_tokens=40), range(0, 64, 2))
    assert texts == [reply.text() for reply in alone]


def resident(server: LiveServer) -> int:
    """Bytes of memory of the server's process."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


def test_slow_readers(server: LiveServer) -> None:
    answer(server)
    start = resident(server)
    slow = [RawStream(server, prompt=f"s{i}", max_tokens=200) for i in range(16)]
    begins: list[bytes] = [b""] * len(slow)
    for i, stream in enumerate(slow):
        stream.wait_first()
        begins[i] += stream.read(1)
    replies = at_once(lambda i: answer(server, prompt=f"n{i}", max_tokens=5), range(20))
    assert all(reply.usage["completion_tokens"] == 5 for reply in replies)
    for i, stream in enumerate(slow):
        begins[i] += stream.read(1)
    assert resident(server) - start < 64 * 2**20
    # one that catches up has the whole text
    assert slow[0].rest(begins[0]) == answer(server, prompt="s0", max_tokens=200).text()
    for stream in slow[1:]:
        stream.close()
    until(lambda: server.metrics()["kv_cache_usage_perc"] == 0, 5)
    server.check_alive()


def test_the_engines_death_is_told(servers: Servers) -> None:
    server = servers.get("RAND", ())
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    engine = [int(pid) for pid in children if b"lmjax.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    stream = RawStream(server, prompt="d", max_tokens=800)
    stream.wait_first()
    assert len(engine) == 1
    os.kill(engine[0], signal.SIGKILL)
    text = b""
    while part := stream.read():
        text += part
    last = text.decode().rstrip("\n").rsplit("\n\n", 1)[1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert server.send("GET", "/health").status == 503
    assert server.process.wait(10) == 1
    servers.close()
