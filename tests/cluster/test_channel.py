"""The channel between ranks: who is heard, what ends them all. Both ends live in this process."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import zmq

from lmjax.cluster import pulse
from lmjax.cluster.channel import connect, listen, listen_on_own, resolve_address
from lmjax.cluster.messages import Step, Stop
from lmjax.cluster.ranks import Ranks
from lmjax.config import ConfigError


class Pair:
    """Rank 0 and rank 1, with what each of them died of."""

    def __init__(self, key: str = "secret", other: str = "secret"):
        self.contexts = zmq.Context(1), zmq.Context(1)
        links, ports = listen(self.contexts[0], "127.0.0.1", key, [1])
        self.links = links[0], connect(self.contexts[1], "127.0.0.1", other, ports[1])
        self.ends: tuple[queue.Queue, queue.Queue] = queue.Queue(), queue.Queue()
        self.ranks = [
            Ranks(rank, 2, None, [self.links[rank]], lambda message, config, end=end: end.put((message, config)))
            for rank, end in enumerate(self.ends)
        ]

    def met(self, seconds: float = 5.0) -> bool:
        deadline = time.monotonic() + seconds
        while any(ranks.pulse.unmet() for ranks in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not any(ranks.pulse.unmet() for ranks in self.ranks)

    def close(self) -> None:
        for ranks, link, context in zip(self.ranks, self.links, self.contexts, strict=True):
            ranks.pulse.stop()
            link.close()
            context.destroy(linger=0)


@pytest.fixture
def pair(monkeypatch):
    # the thread ends where the process would
    monkeypatch.setattr(pulse.os, "_exit", lambda status: None)
    monkeypatch.setattr(pulse, "PERIOD", 0.1)
    pairs = []

    def make(*keys):
        pairs.append(Pair(*keys))
        return pairs[-1]

    yield make
    for one in pairs:
        one.close()


def test_orders_arrive_in_order_and_a_missing_one_is_found(pair):
    two = pair()
    assert two.met()
    leader, follower = two.ranks
    for number in (1, 2):
        leader.send(Step(number, [(3, (2, 1), b"12345678"), ("swap", (0,), b"")]))
        order = follower.receive()
        assert order == Step(number, [(3, (2, 1), b"12345678"), ("swap", (0,), b"")])
        follower.pulse.taken = order.number
    assert not follower.has_order(0.0)
    leader.send(Step(4, []))
    with pytest.raises(RuntimeError, match="step 4 came after step 2"):
        follower.receive()
    leader.send(Stop())
    assert follower.has_order(1.0) and follower.receive() == Stop()


def test_who_has_another_key_is_not_heard(pair):
    two = pair("secret", "guess")
    assert not two.met(1.0)
    with pytest.raises(RuntimeError, match="rank 1 cannot be reached"):
        two.ranks[0].send(Stop())
    assert not two.ranks[1].has_order(0.2)


def test_a_failure_is_told_to_all(pair):
    two = pair()
    assert two.met()
    threading.Thread(target=two.ranks[1].pulse.fail, args=("rank 1: --model: is bad", True)).start()
    for end in two.ends:
        assert end.get(timeout=5) == ("rank 1: --model: is bad", True)


def test_a_broken_connection_is_a_lost_rank(pair, monkeypatch):
    monkeypatch.setattr(pulse, "BROKEN", 0.2)
    two = pair()
    assert two.met()
    two.ranks[1].pulse.stop()
    two.links[1].close()
    message, config = two.ends[0].get(timeout=5)
    assert "rank 1 is lost" in message and "broke" in message and not config


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_rank_is_lost(pair, monkeypatch, silent):
    monkeypatch.setattr(pulse, "SILENCE", 0.5)
    two = pair()
    assert two.met()
    two.ranks[silent].pulse.stop()
    message, _ = two.ends[1 - silent].get(timeout=5)
    assert f"rank {silent} is lost: rank {1 - silent} has not heard of it" in message


def test_a_rank_that_takes_no_step_hangs(pair, monkeypatch):
    monkeypatch.setattr(pulse, "IDLE", 0.5)
    two = pair()
    assert two.met()
    two.ranks[0].send(Step(1, []))
    message, _ = two.ends[0].get(timeout=5)
    assert message.startswith("rank 1 hangs: it has not taken step 1")


def test_a_rank_that_computes_does_not_hang(pair, monkeypatch):
    """However long its step takes: that is for the step's own time-out."""
    monkeypatch.setattr(pulse, "IDLE", 0.3)
    two = pair()
    assert two.met()
    for number in (1, 2):
        two.ranks[0].send(Step(number, []))
    two.ranks[1].pulse.taken = 1
    with pytest.raises(queue.Empty):
        two.ends[0].get(timeout=1)
    assert two.ranks[0].pulse.states() == "rank 1 has taken 1 and finished 0 of 2 steps"


def test_addresses():
    assert resolve_address("localhost", 1, 0.0) in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match=r"--master-addr: got no\.such\.host\.invalid"):
        resolve_address("no.such.host.invalid", 1, 0.0)
    with pytest.raises(ConfigError, match="--master-addr: rank 0 cannot listen on there"):
        listen_on_own("192.0.2.1", "there", 29500)


def test_a_name_that_only_this_host_reaches_is_refused(monkeypatch):
    """Debian gives a host's own name 127.0.1.1."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *a, **k: [(2, 1, 6, "", ("127.0.1.1", 1))])
    with pytest.raises(ConfigError, match=r"--master-addr: node1 is 127\.0\.1\.1 here"):
        resolve_address("node1", 1, 0.0)


def test_an_end_that_was_asked_for_is_no_failure(pair):
    two = pair()
    assert two.met()
    for ranks, link in zip(two.ranks, two.links, strict=True):
        ranks.pulse.stop()
        link.close()
    assert all(end.empty() for end in two.ends)
