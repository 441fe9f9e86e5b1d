"""The engine in a process of its own, and the channel to it.

Two zmq sockets of ipc transport in a private directory (mode 0700), messages in MessagePack (records.py). The child is
started as ``python -m lmjax.engine.process`` and not with multiprocessing, so a plain script needs no
``if __name__ == "__main__"``. Its settings come on stdin, which the parent then holds open: end of file there means
that the parent is gone. The parent learns of the child's death from ``waitpid``. Neither waits for the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from lmjax.config import ConfigError, EngineConfig
from lmjax.engine.records import AbortRequest, AddRequest, Dead, Inbound, Outbound, Progress, Ready, Shutdown
from lmjax.engine.watchdog import Watchdog, step_timeout

log = logging.getLogger("lmjax.engine")

_ROOT = Path(__file__).resolve().parents[2]
HUNG = 4  # exit status after a step that did not finish
_LONGEST_IPC_PATH = 100  # of 107 bytes that a unix socket's address may have


def _socket(context: zmq.Context, kind: int, address: str, bind: bool) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(0)  # the reader's backlog is bounded elsewhere; a full queue would block the loop
    socket.linger = 0
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class EngineProcess:
    """The parent's end. ``on_exit(code)`` is called from a thread when the child has ended, for whatever reason."""

    def __init__(
        self,
        config: EngineConfig,
        executor: str,
        on_exit: Callable[[int], None],
        environment: dict[str, str] | None = None,
    ):
        self._directory = _private_directory()
        base = f"ipc://{self._directory}"
        self._context = zmq.Context(1)
        self._outbox = _socket(self._context, zmq.PUSH, f"{base}/in", bind=True)
        self._inbox = _socket(self._context, zmq.PULL, f"{base}/out", bind=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Outbound).decode
        boot = {
            "config": dataclasses.asdict(config),
            "executor": executor,
            "directory": self._directory,
            "log_level": logging.getLogger("lmjax").getEffectiveLevel(),
        }
        self._child = _spawn(environment or {})
        assert self._child.stdin is not None
        # a child that dies at once is reported by on_exit
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(boot).encode() + b"\n")
            self._child.stdin.flush()
        self._watch = threading.Thread(target=self._wait, args=(on_exit,), daemon=True, name="lmjax-engine-watch")
        self._watch.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def released(self) -> bool:
        return self._context.closed

    def fileno(self) -> int:
        """Becomes readable when messages *begin* to arrive: then ``receive`` until there is none."""
        descriptor = self._inbox.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def send(self, message: AddRequest | AbortRequest | Shutdown) -> None:
        """To a child that is ready. One that has died has no socket, and then zmq would wait for the next one."""
        with contextlib.suppress(zmq.Again):
            self._outbox.send(self._encode(message), zmq.NOBLOCK)

    def receive(self) -> Any:
        """The next message of the child, or None if there is none yet."""
        try:
            return self._decode(self._inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def end(self, grace: float) -> None:
        """Waits up to ``grace`` seconds for the child to end, then kills it. Blocks, but may run in any thread."""
        self._watch.join(grace)
        if self._watch.is_alive():
            self._child.kill()
        self._watch.join()

    def release(self) -> None:
        """Frees what belonged to the channel; the child has ended. Sockets belong to one thread: call it there."""
        if self._context.closed:
            return
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait(self, on_exit: Callable[[int], None]) -> None:
        on_exit(self._child.wait())


def _private_directory() -> str:
    directory = tempfile.mkdtemp(prefix="lmjax-")  # mode 0700
    if len(directory) > _LONGEST_IPC_PATH:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="lmjax-", dir="/tmp")
    return directory


def _spawn(extra: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = os.environ | extra
    if Path(sysconfig.get_path("purelib")).resolve() != _ROOT:  # run from a checkout
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
    # -P: the working directory is no place to import from
    command = [sys.executable, "-P", "-m", "lmjax.engine.process"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)


# --- the child's side ---------------------------------------------------------------------------------------------


class Channel:
    """The child's end: ``receive`` for the engine's loop and ``send`` for its records."""

    def __init__(self, directory: str):
        self._directory = directory
        self._context = zmq.Context(1)
        self._inbox = _socket(self._context, zmq.PULL, f"ipc://{directory}/in", bind=False)
        self._outbox = _socket(self._context, zmq.PUSH, f"ipc://{directory}/out", bind=False)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Inbound).decode

    def receive(self, timeout: float | None) -> list[Inbound]:
        """What has arrived; if nothing has, waits up to ``timeout`` seconds (0: not at all, None: for ever)."""
        messages: list[Inbound] = []
        if timeout == 0 or self._inbox.poll(None if timeout is None else int(timeout * 1000)):
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(self._decode(self._inbox.recv(zmq.NOBLOCK)))
        return messages

    def send(self, message: Outbound) -> None:
        self._outbox.send(self._encode(message))

    def last_words(self, message: str) -> None:
        """From another thread than the loop's, which hangs: over a socket of its own. Ends the process."""
        log.critical("%s", message)
        socket = _socket(self._context, zmq.PUSH, f"ipc://{self._directory}/out", bind=False)
        socket.send(self._encode(Dead(message)))
        socket.close(linger=1000)
        time.sleep(0.5)  # the context cannot be ended while the loop's sockets are open
        os._exit(HUNG)

    def close(self) -> None:
        """Gives the parent two seconds to take what was sent last."""
        self._inbox.close()
        self._outbox.close(linger=2000)
        self._context.term()


def main() -> int:
    boot = json.loads(sys.stdin.buffer.readline())
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group; the parent drains and tells us when to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("lmjax").setLevel(boot["log_level"])
    directory = boot["directory"]
    threading.Thread(target=_end_with_parent, args=(os.getppid(), directory), daemon=True).start()
    channel = Channel(directory)
    try:
        return serve(EngineConfig(**boot["config"]), boot["executor"], channel)
    finally:
        channel.close()


def serve(config: EngineConfig, executor: str, channel: Channel) -> int:
    """Builds the engine and runs its loop until Shutdown. Failures go to the parent as one line."""
    from lmjax.engine.build import build_engine

    try:
        engine, info = build_engine(config, lambda line: channel.send(Progress(line)), executor, channel.send)
    except (
        ConfigError,
        ValueError,
        OSError,
    ) as error:  # settings or files; weights' and models' errors are ValueErrors
        log.debug("the engine could not start", exc_info=True)
        channel.send(Dead(one_line(error), config=True))
        return 2
    except Exception as error:
        log.exception("the engine could not start")
        channel.send(Dead(f"the engine could not start: {type(error).__name__}: {one_line(error)}"))
        return 1
    channel.send(Ready(info))
    # what lives now lives for ever: keep the collector from walking it in the middle of a step
    gc.collect()
    gc.freeze()
    timeout = step_timeout(config.step_timeout, info.platform)
    watchdog = Watchdog(timeout, channel.last_words) if timeout else None
    try:
        engine.run(channel.receive, watchdog)
    except Exception as error:
        log.exception("the engine's loop failed")
        channel.send(Dead(f"the engine's loop failed: {type(error).__name__}: {one_line(error)}"))
        return 1
    finally:
        if watchdog is not None:
            watchdog.stop()
        engine.executor.close()
    return 0


def one_line(error: BaseException) -> str:
    """The first line of the message, bounded; the name of the error if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _end_with_parent(parent: int, directory: str) -> None:
    """Nothing is lost by ending at once: nobody is left to read. The parent can't remove the directory any more."""
    stdin = sys.stdin.fileno()
    while os.getppid() == parent:
        readable, _, _ = select.select([stdin], [], [], 1.0)
        if readable and not os.read(stdin, 4096):
            break
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
