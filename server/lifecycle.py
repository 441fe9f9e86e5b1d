"""The life of a server process: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from lmjax.protocol import EngineClient
from server.routes import attach, make_app
from server.settings import ServerSettings
from server.state import STATE, ServerState

log = logging.getLogger("lmjax.server")

DEAD_POLL = 0.2  # seconds between looks at the engine
DEAD_GRACE = 3.0  # open streams get their error event and /health says 503 for so long, then the process ends
ABORT_GRACE = 5.0  # for aborted requests to write their last event

ClientFactory = Callable[[], Awaitable[EngineClient]]


def run_server(client_factory: ClientFactory, settings: ServerSettings, label: str = "") -> int:
    """Serves until SIGTERM or SIGINT; returns the process's exit code.

    0: ended as asked. 1: the address cannot be used, or the engine died. The address is bound before the engine
    loads. What ``client_factory`` raises is raised from here, once the server is closed. ``label``: see
    ``set_up_logging``.
    """
    settings.validate()
    set_up_logging(settings.log_level, label)
    return asyncio.run(_Server(client_factory, settings).run())


class _Server:
    def __init__(self, client_factory: ClientFactory, settings: ServerSettings):
        self._factory, self._settings = client_factory, settings
        self._app = make_app(None, settings)
        self._state: ServerState = self._app[STATE]
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            self._watch_signals()
            if not await self._bind(runner):
                return 1
            return await self._serve()
        finally:
            await runner.cleanup()
            self._state.pool.shutdown(wait=False, cancel_futures=True)
            if self._state.client is not None:
                await self._state.client.close()

    async def _bind(self, runner: web.AppRunner) -> bool:
        s = self._settings
        try:
            context = _ssl_context(s)
            if s.uds:
                _clear_stale_socket(s.uds)
                site: web.BaseSite = web.UnixSite(runner, s.uds, ssl_context=context)
            else:
                site = web.SockSite(runner, _listen(s.host, s.port), ssl_context=context, backlog=1024)
            await site.start()
        except (OSError, ssl.SSLError) as exc:
            print(f"lmjax: cannot listen on {s.address}: {exc.strerror or exc}", file=sys.stderr)
            return False
        if not s.uds:
            self._settings = s = replace(s, port=runner.addresses[0][1])  # port 0: the one that was free
        log.info("listening on %s", s.address)
        return True

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def asked() -> None:
            (self._hurry if self._stop.is_set() else self._stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked)

    async def _serve(self) -> int:
        loading = asyncio.ensure_future(self._factory())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return 0
            client = loading.result()
            attach(self._app, client)
            log.info("ready: %s on %s", ", ".join(self._state.model_names), self._settings.address)
            log.info("try: %s", self._settings.example_for(client.info))
            while not stopping.done():
                if client.dead:
                    return await self._mourn(client.dead)
                self._state.metrics.poll()
                await asyncio.wait((stopping,), timeout=DEAD_POLL)
            await self._drain(client)
            return 0
        finally:
            stopping.cancel()
            if not loading.done():
                loading.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await loading

    async def _drain(self, client: EngineClient) -> None:
        """New requests get 503; running ones go on until the timeout, or a second signal, or the engine's death."""
        state, timeout = self._state, self._settings.shutdown_timeout
        state.draining = True
        log.info("draining: %d running requests have %g s", len(state.active), timeout)
        deadline = asyncio.get_running_loop().time() + timeout
        while state.active and not self._hurry.is_set() and not client.dead:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            await asyncio.wait(set(state.active), timeout=min(left, 0.1))
        await self._abort("the server is shutting down")

    async def _mourn(self, reason: str) -> int:
        log.error("the engine is dead: %s", reason)
        await asyncio.sleep(DEAD_GRACE)
        await self._abort(f"the engine is dead: {reason}")
        return 1

    async def _abort(self, reason: str) -> None:
        """Ends what still runs; each stream writes its last event."""
        state = self._state
        if not state.active:
            return
        log.warning("aborting %d requests: %s", len(state.active), reason)
        state.aborting = reason
        tasks = set(state.active)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=ABORT_GRACE)


def _listen(host: str, port: int) -> socket.socket:
    """One bound socket, made by hand so that a busy port is found out before anything else happens."""
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _clear_stale_socket(path: str) -> None:
    """Removes the socket of a server that ended without cleaning up; ``OSError`` if one still answers there."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _ssl_context(settings: ServerSettings) -> ssl.SSLContext | None:
    if not settings.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    return context


def set_up_logging(level: str, label: str = "") -> None:
    """Access lines are bare JSON; others have a time, a level and ``label``. Both go to stderr."""
    root = logging.getLogger("lmjax")
    root.setLevel(level.upper())
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {label}%(name)s: %(message)s"))
        root.addHandler(handler)
    access = logging.getLogger("lmjax.access")
    if not access.handlers:
        plain = logging.StreamHandler()
        plain.setFormatter(logging.Formatter("%(message)s"))
        access.addHandler(plain)
        access.propagate = False
