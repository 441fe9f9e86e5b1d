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

from lmjax.cluster.ranks import Ranks, join, joined
from lmjax.config import ConfigError, EngineConfig
from lmjax.engine.records import Dead, Following, Inbound, Outbound, Progress, Ready
from lmjax.engine.vital_signs import SILENCE, VitalSigns
from lmjax.engine.watchdog import Watchdog, step_timeout
from lmjax.types import ModelError

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
        label: str = "",
    ):
        self._directory = _private_directory()
        base = f"ipc://{self._directory}"
        self._context = zmq.Context(1)
        self._outbox = _socket(self._context, zmq.PUSH, f"{base}/in", bind=True)
        self._inbox = _socket(self._context, zmq.PULL, f"{base}/out", bind=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Outbound).decode
        self.name = "the engine process" if config.nnodes == 1 else f"the engine process of rank {config.node_rank}"
        self.verdict: str | None = None  # why the child was killed, if it was from here
        # on one host the engine may be stopped and go on (in a debugger); others would wait for it meanwhile
        mine, childs = os.pipe() if config.nnodes > 1 else (None, None)
        boot = {
            "config": dataclasses.asdict(config),
            "executor": executor,
            "directory": self._directory,
            "label": label or config.rank_label,
            "log_level": logging.getLogger("lmjax").getEffectiveLevel(),
            "signs": childs,
        }
        self._child = _spawn(environment or {}, childs)
        assert self._child.stdin is not None
        # a child that dies at once is reported by on_exit
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(boot).encode() + b"\n")
            self._child.stdin.flush()
        self._signs: VitalSigns | None = None
        if mine is not None and childs is not None:
            os.close(childs)
            self._signs = VitalSigns(self._child.stdin.fileno(), mine, self._silent, lambda: None)
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

    def send(self, message: Inbound) -> None:
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
        if self._signs is not None:
            self._signs.stop()
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _silent(self) -> None:
        self.verdict = f"{self.name} gave no sign of life for {SILENCE:g} s: it is stopped, or hangs"
        self._child.kill()

    def _wait(self, on_exit: Callable[[int], None]) -> None:
        on_exit(self._child.wait())


def _private_directory() -> str:
    directory = tempfile.mkdtemp(prefix="lmjax-")  # mode 0700
    if len(directory) > _LONGEST_IPC_PATH:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="lmjax-", dir="/tmp")
    return directory


def _spawn(extra: dict[str, str], descriptor: int | None) -> subprocess.Popen[bytes]:
    environment = os.environ | extra
    if Path(sysconfig.get_path("purelib")).resolve() != _ROOT:  # run from a checkout
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
    # -P: the working directory is no place to import from
    command = [sys.executable, "-P", "-m", "lmjax.engine.process"]
    passed = () if descriptor is None else (descriptor,)
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=passed)


# --- the child's side ---------------------------------------------------------------------------------------------


class Channel:
    """The child's end: ``receive`` for the engine's loop and ``send`` for its records."""

    def __init__(self, directory: str):
        self.directory = directory
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

    def last_words(self, message: str, config: bool = False) -> None:
        """From another thread than the loop's, which hangs: over a socket of its own. Ends the process."""
        log.critical("%s", message)
        socket = _socket(self._context, zmq.PUSH, f"ipc://{self.directory}/out", bind=False)
        socket.send(self._encode(Dead(message, config)))
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
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {boot['label']}%(name)s: %(message)s")
    logging.getLogger("lmjax").setLevel(boot["log_level"])
    directory = boot["directory"]
    channel = Channel(directory)
    look_after_parent(os.getppid(), boot["signs"], channel)
    try:
        return serve(EngineConfig(**boot["config"]), boot["executor"], channel)
    finally:
        channel.close()


def serve(config: EngineConfig, executor: str, channel: Channel) -> int:
    """Builds the engine, or what follows another rank's, and runs its loop until the end is asked for.

    Failures go to the parent as one line, and to the other ranks, if there are any.
    """
    ranks: Ranks | None = None
    try:
        ranks = join(config, lambda line: channel.send(Progress(line)), channel.last_words)
        run, close = _follower(config, channel) if config.node_rank else _engine(config, executor, channel, ranks)
    except (
        ConfigError,
        ValueError,
        OSError,
    ) as error:  # settings or files; weights' and models' errors are ValueErrors
        log.debug("the engine could not start", exc_info=True)
        model = isinstance(error, ModelError)
        return _failed(channel, ranks, one_line(error), config=not model, model=model)
    except Exception as error:
        log.exception("the engine could not start")
        return _failed(channel, ranks, f"the engine could not start: {type(error).__name__}: {one_line(error)}")
    # what lives now lives for ever: keep the collector from walking it in the middle of a step
    gc.collect()
    gc.freeze()
    try:
        run()
    except Exception as error:
        log.exception("the engine's loop failed")
        return _failed(channel, ranks, f"the engine's loop failed: {type(error).__name__}: {one_line(error)}")
    finally:
        close()
    return 0


Loop = tuple[Callable[[], None], Callable[[], None]]  # run, close


def _engine(config: EngineConfig, executor: str, channel: Channel, ranks: Ranks | None) -> Loop:
    from lmjax.engine.build import build_engine

    engine, info = build_engine(config, lambda line: channel.send(Progress(line)), executor, channel.send)
    channel.send(Ready(info, engine.loras.infos()))
    timeout = step_timeout(config.step_timeout, info.platform, config.nnodes)
    watchdog = Watchdog(timeout, ranks.hung if ranks else channel.last_words) if timeout else None

    def close() -> None:
        if watchdog is not None:
            watchdog.stop()
        engine.executor.close()

    return lambda: engine.run(channel.receive, watchdog), close


def _follower(config: EngineConfig, channel: Channel) -> Loop:
    from lmjax.runtime.executor import build_follower

    follower = build_follower(config, lambda line: channel.send(Progress(line)))
    channel.send(Following())
    return follower.run, follower.close


def _failed(channel: Channel, ranks: Ranks | None, message: str, config: bool = False, model: bool = False) -> int:
    """Tells the parent. With other ranks it does not return: their collectives would wait for this one for ever."""
    if ranks is not None:
        ranks.failed(message, config)
    channel.send(Dead(message, config, model))
    return 2 if config else 1


def one_line(error: BaseException) -> str:
    """The first line of the message, bounded; the name of the error if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def look_after_parent(parent: int, signs: int | None, channel: Channel) -> None:
    """Nothing is lost by ending with it: nobody is left to read. It can't remove the directory any more."""

    def ended() -> None:
        shutil.rmtree(channel.directory, ignore_errors=True)
        os._exit(3)

    def silent() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)  # stopped, it would stay for ever
        message = f"the front end gave no sign of life for {SILENCE:g} s: it is stopped, or hangs"
        if ranks := joined():
            ranks.pulse.fail(f"rank {ranks.rank}: {message}")
        channel.last_words(message)

    VitalSigns(signs, sys.stdin.fileno(), silent if signs is not None else None, ended, lambda: os.getppid() == parent)


if __name__ == "__main__":
    sys.exit(main())
