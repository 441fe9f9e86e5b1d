"""Heartbeats between rank 0 and the others, from a thread of each: a lost, hung or failed rank ends them all.

A stopped process beats no more, whatever stopped it; one whose loop hangs tells so by its counts. Collectives cannot be
called off, so the end is ``os._exit``: nothing that waits for a device or for JAX's own service runs on the way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from lmjax.cluster.channel import Link
from lmjax.cluster.messages import Beat, Failed, Loaded, Word

log = logging.getLogger("lmjax.cluster")

PERIOD = 1.0  # seconds between beats
SILENCE = 15.0  # without a beat for so long: stopped, hung, or its host is gone
BROKEN = 1.0  # seconds for what came last before a connection broke
IDLE = 20.0  # a rank that has finished all it took, and takes no further step for so long, hangs
LOST = 5  # exit status where another rank is lost

Ending = Callable[[str, bool], None]  # (message, config): tells whoever has to know; may end the process


class _Peer:
    def __init__(self, link: Link, now: float):
        self.link, self.heard, self.beat = link, now, Beat()
        self.broke: float | None = None
        self.met = False  # has been heard at all
        self.behind: float | None = None  # since when it takes no step though it could


class Pulse:
    """``end``: is called once, from the thread, with the reason; the process exits after it."""

    def __init__(self, rank: int, links: list[Link], end: Ending):
        self.taken = self.done = 0  # of this rank; rank 0: steps it has sent
        self._rank, self._end = rank, end
        self._peers = [_Peer(link, time.monotonic()) for link in links]
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Word).decode
        self.loaded: dict[int, Loaded] = {}  # by rank: what it has said last
        self._sayings: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[Failed] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lmjax-pulse")
        self._thread.start()

    def fail(self, message: str, config: bool = False) -> None:
        """This rank cannot go on: all are told, and this process exits. Does not return."""
        self._failures.put(Failed(message, config))
        self._thread.join()
        os._exit(LOST)

    def say(self, word: Loaded) -> None:
        """Tells the others, soon."""
        self._sayings.put(word)

    def verdict(self, seconds: float) -> None:
        """After an error of this rank: it may follow from another's loss, which the thread will tell better."""
        self._thread.join(seconds)

    def unmet(self) -> list[int]:
        """Ranks that have not been heard yet."""
        return [peer.link.rank for peer in self._peers if not peer.met]

    def states(self) -> str:
        """What the others have done, for a message."""
        return ", ".join(
            f"rank {p.link.rank} has taken {p.beat.taken} and finished {p.beat.done} of {self.taken} steps"
            for p in self._peers
            if p.link.rank
        )

    def stop(self) -> None:
        """The end was asked for: connections may break now."""
        self._stopped.set()
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            failed = self._watch()
        except Exception as error:  # without this thread a lost rank would hang the others for ever
            log.exception("the heartbeat failed")
            failed = Failed(f"rank {self._rank}: the heartbeat failed: {type(error).__name__}: {error}")
        if failed is None:
            return
        self._say(failed)
        time.sleep(0.3)  # they leave before this process breaks their connections to it
        try:
            self._end(failed.message, failed.config)
        finally:
            os._exit(LOST)

    def _say(self, word: Word) -> None:
        for peer in self._peers:
            with contextlib.suppress(zmq.Again):  # its connection is broken
                peer.link.words.send(self._encode(word), zmq.NOBLOCK)

    def _watch(self) -> Failed | None:
        poller = zmq.Poller()
        for peer in self._peers:
            poller.register(peer.link.words, zmq.POLLIN)
            poller.register(peer.link.monitor, zmq.POLLIN)
        next_beat = 0.0
        while not self._stopped.is_set():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + PERIOD
                self._say(Beat(self.taken, self.done))
            while not self._sayings.empty():
                self._say(self._sayings.get())
            ready = dict(poller.poll(100))
            for peer in self._peers:
                if failed := self._look(peer, ready):
                    return failed
            if not self._failures.empty():
                return self._failures.get()
        return None

    def _look(self, peer: _Peer, ready: dict[Any, int]) -> Failed | None:
        now = time.monotonic()
        if peer.link.monitor in ready:
            recv_monitor_message(peer.link.monitor)
            peer.broke = peer.broke or now
        while peer.link.words.poll(0):
            word = self._decode(peer.link.words.recv())
            if isinstance(word, Failed):
                return word
            if isinstance(word, Loaded):
                self.loaded[peer.link.rank] = word
                continue
            peer.met, peer.heard, peer.broke, peer.beat = True, time.monotonic(), None, word
        return self._judge(peer, time.monotonic())

    def _judge(self, peer: _Peer, now: float) -> Failed | None:
        rank, beat = peer.link.rank, peer.beat
        if not peer.met:
            return None  # it has not connected yet; whoever waits for it has a time-out
        if peer.broke is not None and now - peer.broke > BROKEN:
            return Failed(f"rank {rank} is lost: its connection to rank {self._rank} broke, its process has ended")
        if now - peer.heard > SILENCE:
            return Failed(
                f"rank {rank} is lost: rank {self._rank} has not heard of it for {SILENCE:g} s; "
                "it is stopped, hangs, or its host is gone"
            )
        idle = rank > 0 and beat.taken == beat.done < self.taken
        peer.behind = (peer.behind or now) if idle else None
        if peer.behind is not None and now - peer.behind > IDLE:
            return Failed(f"rank {rank} hangs: it has not taken step {beat.taken + 1} for {IDLE:g} s")
        return None


def say_and_leave(message: str, config: bool) -> None:
    """``Ending`` where nobody else is to be told."""
    print(f"lmjax: error: {message}", file=sys.stderr, flush=True)
    os._exit(LOST)
