"""The processes of one engine, one a host: finding each other through ``jax.distributed``, and talking afterwards."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from lmjax.cluster.channel import Link, connect, listen, listen_on_own, resolve_address
from lmjax.cluster.door import Door, free_port, knock
from lmjax.cluster.messages import Order, Step, Stop
from lmjax.cluster.pulse import LOST, Ending, Pulse, say_and_leave
from lmjax.config import ConfigError, EngineConfig

log = logging.getLogger("lmjax.cluster")

KEY = "LMJAX_CLUSTER_KEY"
START = 1800  # seconds until the last rank may have come: one may have weights to download first
REMIND = 60.0  # seconds between lines that name the ranks that are missing
CONNECT = 300  # seconds for JAX's service, once all have come
NAMED = 120.0  # seconds for rank 0's host to get its name
MEET = 60.0  # seconds for the channel to open
FOR_EVER = 10**9  # milliseconds: whoever is waited for is watched by the heartbeat
HEARTBEAT = 60  # seconds; JAX's own service, should all of ours fail
LOOK_AROUND = 4.0  # seconds in which a lost rank is found out, where it ended
SHUTDOWN = 10  # seconds in which the ranks must meet to end together

_joined: Ranks | None = None


class Ranks:
    """This process among the ``count`` of its engine. Rank 0 sends orders, the others receive them."""

    def __init__(self, rank: int, count: int, client: Any, links: list[Link], end: Ending):
        self.rank, self.count = rank, count
        self.on_this_host = 1  # ranks that share this host's memory
        self.left = False
        self.door: Door | None = None  # of rank 0
        self._client, self._links = client, links
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Order).decode
        self.pulse = Pulse(rank, links, end)

    def exchange(self, name: str, value: str) -> list[str]:
        """Every rank's value, in their order. Each rank calls it with the same names, each once."""
        return _exchange(self._client, self.rank, self.count, name, value)

    def send(self, order: Order) -> None:
        """To all others. Never blocks; ``RuntimeError`` where a connection is broken."""
        packed = self._encode(order)
        for link in self._links:
            try:
                link.orders.send(packed, zmq.NOBLOCK)
            except zmq.Again:
                raise RuntimeError(f"rank {link.rank} cannot be reached") from None
        if isinstance(order, Step):
            self.pulse.taken = order.number

    def has_order(self, seconds: float) -> bool:
        """Whether ``receive`` would return at once; waits up to so long for that."""
        return bool(self._links[0].orders.poll(int(seconds * 1000)))

    def receive(self) -> Order:
        """The next order of rank 0; waits for it. ``RuntimeError`` where a step is missing."""
        order = self._decode(self._links[0].orders.recv())
        if isinstance(order, Step) and order.number != self.pulse.taken + 1:
            raise RuntimeError(f"step {order.number} came after step {self.pulse.taken}")
        return order

    def failed(self, message: str, config: bool = False) -> None:
        """This rank had an error: all ranks end. Does not return.

        The error may follow from another rank's loss (a broken collective): then that is what is told.
        """
        if not config:
            self.pulse.verdict(LOOK_AROUND)
        self.pulse.fail(f"rank {self.rank}: {message}", config)

    def hung(self, message: str) -> None:
        """As ``failed``, where a step does not end."""
        self.pulse.fail(f"rank {self.rank}: {message}; {self.pulse.states()}")

    def leave(self) -> None:
        """The ranks end together: rank 0 calls it first. May be called twice."""
        import jax

        if self.left:
            return
        self.left = True
        self.pulse.stop()
        if self.rank == 0:
            try:
                self.send(Stop())
            except RuntimeError as error:  # it has ended already
                log.warning("%s", error)
        for link in self._links:
            link.close()
        if self.door is not None:
            self.door.close()
        jax.distributed.shutdown()


def joined() -> Ranks | None:
    return _joined


def join(config: EngineConfig, tell: Callable[[str], None], end: Ending = say_and_leave) -> Ranks | None:
    """Meets the other ranks; None where there are none. Once a process: later calls return the same.

    end: see ``Pulse``. Raises ``ConfigError`` for an address that cannot be used.
    """
    global _joined
    if _joined is not None and _joined.left:
        raise ConfigError("--nnodes: an engine on several hosts has ended in this process; the next needs a new one")
    if config.nnodes == 1 or _joined is not None:
        return _joined
    assert config.node_rank is not None and config.master_addr is not None
    address = resolve_address(config.master_addr, config.master_port, NAMED, tell)
    door, port = _come_together(config, address, tell, end)
    client = _initialize(config, address, port, end)
    links = _open(config, address, client)
    _joined = Ranks(config.node_rank, config.nnodes, client, links, end)
    _joined.door = door
    atexit.register(_joined.leave)
    _meet(_joined)
    hosts = _joined.exchange("host", _host_id())
    _joined.on_this_host = hosts.count(hosts[config.node_rank])
    tell(f"rank {config.node_rank} of {config.nnodes} has joined")
    return _joined


def _come_together(
    config: EngineConfig, address: str, tell: Callable[[str], None], end: Ending
) -> tuple[Door | None, int]:
    """At the master port (see ``door.py``). Returns the port of JAX's service. Raises ``ConfigError``."""
    import jax  # noqa: F401  # whoever is let in goes on at once

    rank, count, port = config.node_rank or 0, config.nnodes, config.master_port
    where, others = _endpoint(address, port), "rank 0" if rank else "the other ranks"
    door = None if rank else Door(listen_on_own(address, config.master_addr or address, port), count)
    tell(f"rank {rank} of {count} waits for {others} at {where} (up to {START // 60} minutes)")
    if door is None:
        told = knock(address, port, rank, count, START)
        if told is None:
            _late(f"rank {rank}: the ranks did not come together at {where} in time", end)
        return None, told
    try:
        deadline = time.monotonic() + START
        while missing := door.wait(min(REMIND, max(0.0, deadline - time.monotonic()))):
            names = ", ".join(f"rank {one}" for one in missing)
            if time.monotonic() >= deadline:
                _late(f"rank 0: did not come to {where} in time: {names}", end)
            tell(f"rank 0 of {count} still waits for {names} at {where}")
    except BaseException:
        door.close()
        raise
    found = free_port(address)
    door.let_go(found)
    return door, found


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _initialize(config: EngineConfig, address: str, port: int, end: Ending) -> Any:
    """JAX's service, where all come at once. A rank that is lost just now would be waited for without an end."""
    import jax
    from jax._src import distributed  # its key-value store has no public name

    where = _endpoint(address, port)
    late = threading.Timer(CONNECT, _late, (f"rank {config.node_rank}: not all ranks came to {where} in time", end))
    late.daemon = True
    late.start()
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    jax.distributed.initialize(
        where,
        config.nnodes,
        config.node_rank,
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT + 60,  # at its end JAX aborts the process
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=SHUTDOWN,
        coordinator_bind_address=where,
    )
    late.cancel()
    return distributed.global_state.client


def _late(message: str, end: Ending) -> NoReturn:
    """Does not return."""
    try:
        end(message, False)
    finally:
        os._exit(LOST)


def _open(config: EngineConfig, address: str, client: Any) -> list[Link]:
    """The channel. Its key is ``LMJAX_CLUSTER_KEY``; without one rank 0 draws it and tells it over JAX's store."""
    given, context = os.environ.get(KEY), zmq.Context(1)
    assert config.node_rank is not None
    prints = _exchange(client, config.node_rank, config.nnodes, "key print", _print_of(given))
    for rank, text in enumerate(prints):
        if text != prints[0]:
            if config.node_rank == 0:
                time.sleep(1.0)  # the others read from a store in this process
            raise ConfigError(f"{KEY}: is {prints[0]} on rank 0 and {text} on rank {rank}")
    if config.node_rank == 0:
        key = given or secrets.token_hex(32)
        links, ports = listen(context, address, key, list(range(1, config.nnodes)))
        for rank, pair in ports.items():
            client.key_value_set(f"lmjax/ports/{rank}", pair)
        if not given:
            client.key_value_set("lmjax/key", key)
        return links
    told = given or client.blocking_key_value_get("lmjax/key", FOR_EVER)
    ports = client.blocking_key_value_get(f"lmjax/ports/{config.node_rank}", FOR_EVER)
    return [connect(context, address, told, ports)]


def _exchange(client: Any, rank: int, count: int, name: str, value: str) -> list[str]:
    client.key_value_set(f"lmjax/{name}/{rank}", value)
    return [client.blocking_key_value_get(f"lmjax/{name}/{r}", FOR_EVER) for r in range(count)]


def _print_of(key: str | None) -> str:
    """Tells keys apart, and a random key not at all."""
    return f"a key with the print {hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}" if key else "not set"


def _meet(ranks: Ranks) -> None:
    deadline = time.monotonic() + MEET
    while missing := ranks.pulse.unmet():
        if time.monotonic() > deadline:
            ranks.pulse.fail(f"rank {ranks.rank} and rank {missing[0]} cannot talk: do they reach each other's ports?")
        time.sleep(0.05)


def _host_id() -> str:
    """Equal in all processes of a machine, until it boots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
