"""The master port: where the ranks come together before any of them meets JAX's service.

That service ends everybody when a rank comes twice, and does not say why. So rank 0 listens here first: each rank says
who it is and waits with its connection open. A second one of the same number is refused, one that leaves may come
again. When all are here, they are told the port of JAX's service; nobody is let in after that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from typing import Any

from lmjax.config import ConfigError

log = logging.getLogger("lmjax.cluster")

GREETING = "lmjax 1"
LONGEST = 1000  # bytes of a message
HELLO = 10.0  # seconds for a connection to say who it is
RETRY = 0.5  # seconds between a rank's tries to reach rank 0
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a rank whose host is gone leaves in 25 s


class Door:
    """Rank 0's end. ``listener``: a bound socket, which it takes. A thread serves it until ``close``."""

    def __init__(self, listener: socket.socket, count: int):
        self._count, self._listener = count, listener
        self._here: dict[int, asyncio.StreamWriter] = {}
        self._lock = threading.Lock()  # of the above, and of the two below
        self._full, self._open = threading.Event(), True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lmjax-door")
        self._thread.start()

    def wait(self, seconds: float) -> list[int]:
        """The ranks that have not come within so long; none: all are here, and nobody else is let in."""
        deadline = time.monotonic() + seconds
        while True:
            self._full.wait(max(0.0, deadline - time.monotonic()))
            with self._lock:
                missing = [rank for rank in range(1, self._count) if rank not in self._here]
                self._open = bool(missing)
                if missing:
                    self._full.clear()
            if not missing or time.monotonic() >= deadline:
                return missing

    def let_go(self, port: int) -> None:
        """All may go on to JAX's service on that port."""
        self._loop.call_soon_threadsafe(self._tell_all, {"port": port})

    def close(self) -> None:
        """May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(asyncio.start_server(self._greet, sock=self._listener, limit=LONGEST))
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._listener.close()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for as long as it is open."""
        rank: int | None = None
        _keep_alive(writer.get_extra_info("socket"))
        try:
            async with asyncio.timeout(HELLO):
                hello = _decoded(await reader.readline())
            if hello is None:  # something else that tries ports
                return
            refusal, rank = self._admit(hello, writer)
            if refusal is not None:
                log.warning("refused at the master port: %s (from %s)", refusal, writer.get_extra_info("peername"))
                _tell(writer, {"refused": refusal})
                await writer.drain()
                return
            while await reader.read(LONGEST):  # until it leaves
                pass
        except (OSError, TimeoutError, ValueError):
            pass
        finally:
            if rank is not None:
                self._leave(rank)
            writer.close()

    def _admit(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> tuple[str | None, int | None]:
        """(Why it is refused, None), or (None, its rank)."""
        rank, count = hello.get("rank"), hello.get("count")
        if not isinstance(rank, int) or not isinstance(count, int):  # they get into messages
            return "this is no rank of lmjax", None
        if count != self._count:
            return f"--nnodes: {self._count} on rank 0, {count} on rank {rank}", None
        if not 0 < rank < self._count:
            return f"--node-rank: got {rank}, must be between 1 and {self._count - 1}", None
        with self._lock:
            if rank in self._here or not self._open:
                return f"--node-rank: rank {rank} has joined already; this engine has its {self._count} ranks", None
            self._here[rank] = writer
            if len(self._here) == self._count - 1:
                self._full.set()
        return None, rank

    def _leave(self, rank: int) -> None:
        with self._lock:
            if self._open:  # else it was let in: whether it lives is the heartbeat's matter
                del self._here[rank]
                log.warning("rank %d has left before all ranks had come", rank)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for writer in self._here.values():
            _tell(writer, message)


def knock(address: str, port: int, rank: int, count: int, seconds: float) -> int | None:
    """A rank's end: waits until all ranks are here. Returns the port of JAX's service; None: not in time.

    Raises ``ConfigError`` where rank 0 does not let it in.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=min(left, 10.0)) as connection:
                _keep_alive(connection)
                connection.sendall(_encoded({"greeting": GREETING, "rank": rank, "count": count}))
                connection.settimeout(left)
                answer = _decoded(connection.makefile("rb").readline(LONGEST))
        except OSError:  # rank 0 is not there yet, or not any more
            answer = None
        if answer is not None and "refused" in answer:
            raise ConfigError(f"{answer['refused']} (said rank 0 at {address}, --master-port {port})")
        if answer is not None:
            return int(answer["port"])
        time.sleep(min(RETRY, max(0.0, deadline - time.monotonic())))
    return None


def free_port(address: str) -> int:
    """One on that address which nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _tell(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(_encoded({"greeting": GREETING} | message))


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _decoded(line: bytes) -> dict[str, Any] | None:
    """None for what is not ours."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("greeting") == GREETING else None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
