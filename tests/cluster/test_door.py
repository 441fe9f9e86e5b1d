"""The master port: who is let in, who is refused, and what happens to one that leaves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lmjax.cluster.channel import listen_on_own, resolve_address
from lmjax.cluster.door import Door, free_port, knock
from lmjax.config import ConfigError


class Meeting:
    """Rank 0's door on a free port, and ranks that come to it."""

    def __init__(self, count: int):
        self.count, self.port = count, free_port("127.0.0.1")
        self.door = Door(listen_on_own("127.0.0.1", "here", self.port), count)
        self.pool = ThreadPoolExecutor(8)

    def come(self, rank: int, count: int | None = None, seconds: float = 10.0) -> Future[int | None]:
        return self.pool.submit(knock, "127.0.0.1", self.port, rank, count or self.count, seconds)

    def present(self, *ranks: int) -> None:
        deadline = time.monotonic() + 5
        while set(self.door._here) != set(ranks):
            assert time.monotonic() < deadline, self.door._here
            time.sleep(0.01)

    def close(self) -> None:
        self.door.close()
        self.pool.shutdown()


@pytest.fixture
def three() -> Iterator[Meeting]:
    meeting = Meeting(3)
    yield meeting
    meeting.close()


def test_a_rank_that_comes_twice_is_refused_and_the_others_go_on(three: Meeting) -> None:
    """While the others are waited for, and afterwards."""
    first = three.come(1)
    three.present(1)
    with pytest.raises(ConfigError, match=r"--node-rank: rank 1 has joined already.*--master-port"):
        three.come(1).result()
    assert three.door.wait(0.05) == [2] and not first.done()
    second = three.come(2)
    assert three.door.wait(5) == []
    with pytest.raises(ConfigError, match="--node-rank: rank 2 has joined already"):
        three.come(2).result()
    three.door.let_go(1234)
    assert first.result() == second.result() == 1234
    with pytest.raises(ConfigError, match="--node-rank: rank 1 has joined already"):
        three.come(1).result()


def test_one_that_leaves_while_it_waits_may_come_again(three: Meeting) -> None:
    with socket.create_connection(("127.0.0.1", three.port)) as early:
        early.sendall(b'{"greeting": "lmjax 1", "rank": 2, "count": 3}\n')
        three.present(2)
    three.present()
    found = [three.come(2), three.come(1)]
    assert three.door.wait(5) == []
    three.door.let_go(1)
    assert [one.result() for one in found] == [1, 1]


@pytest.mark.parametrize(
    ("rank", "count", "message"),
    [
        (1, 4, "--nnodes: 3 on rank 0, 4 on rank 1"),
        (3, 3, "--node-rank: got 3, must be between 1 and 2"),
        (0, 3, "--node-rank: got 0, must be between 1 and 2"),
    ],
)
def test_who_does_not_belong_here_is_told_why(three: Meeting, rank: int, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        three.come(rank, count).result()
    three.present()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * 5000, b""])
def test_what_is_no_rank_is_not_answered_and_not_counted(three: Meeting, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", three.port), timeout=5) as other:
        other.sendall(said)
        other.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it was closed with something unread
            assert other.recv(100) == b""
    ranks = [three.come(1), three.come(2)]
    assert three.door.wait(5) == []
    three.door.let_go(1)
    assert [rank.result() for rank in ranks] == [1, 1]


def test_a_rank_waits_for_rank_0_to_start_and_no_longer_than_its_time() -> None:
    port = free_port("127.0.0.1")
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(knock("127.0.0.1", port, 1, 2, 10.0)))
    thread.start()
    time.sleep(0.1)
    door = Door(listen_on_own("127.0.0.1", "here", port), 2)
    assert door.wait(5) == []
    door.let_go(7)
    thread.join(5)
    assert found == [7]
    door.close()
    assert knock("127.0.0.1", port, 1, 2, 0.2) is None


def test_a_name_that_is_waited_for_is_told_once() -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"--master-addr: got no\.such"):
        resolve_address("no.such.host.invalid", 1, 0.5, said.append)
    assert len(said) == 1 and "no.such.host.invalid has no address yet" in said[0]


def test_what_is_no_number_is_refused_and_not_repeated(three: Meeting) -> None:
    with socket.create_connection(("127.0.0.1", three.port), timeout=5) as other:
        other.sendall(b'{"greeting": "lmjax 1", "rank": "1\\nERROR x", "count": 3}\n')
        answer = other.recv(1000)
    assert b"no rank" in answer and b"ERROR" not in answer
    three.present()
