"""``lmjax serve`` on the ranks beside the first: no HTTP server and no scheduler, only the process that runs what rank
0 says, watched until it ends."""

from __future__ import annotations

import logging
import queue
import signal
import time
from typing import Any

from lmjax.config import ConfigError, EngineConfig
from lmjax.engine.build import DEFAULT_EXECUTOR
from lmjax.engine.process import EngineProcess
from lmjax.engine.records import Dead, Following, Progress
from lmjax.types import EngineDeadError, ModelError
from lmjax.weights.source import resolve_model

log = logging.getLogger("lmjax.engine")

_POLL = 0.2  # seconds between looks at the process
_START_GRACE = 3.0  # seconds, while it is starting
_LAST_WORDS = 0.5  # seconds to wait for a dead process's last message


def run_follower(config: EngineConfig, grace: float) -> int:
    """Until rank 0 ends the engine; returns the exit code.

    SIGTERM and SIGINT: rank 0 gets them, too, and lets its requests finish, which needs this rank; so it goes on for up
    to ``grace`` seconds, or until a second signal. Raises ``ConfigError`` and ``EngineDeadError``.
    """
    rank = config.node_rank
    resolve_model(config.model, config.revision, config.download_dir, config.hf_overrides)  # fetches it, at most once
    log.info("rank %s of %d: no HTTP server here, requests go to rank 0 on %s", rank, config.nnodes, config.master_addr)
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    process = EngineProcess(config, DEFAULT_EXECUTOR, exits.put)
    try:
        return _watch(process, config, exits, signals, grace)
    finally:
        process.end(0.0)
        process.release()


def _watch(
    process: EngineProcess, config: EngineConfig, exits: queue.SimpleQueue[int], signals: list[int], grace: float
) -> int:
    following, asked = False, None
    while exits.empty():
        time.sleep(_POLL)
        for message in _messages(process, config.node_rank):
            following |= isinstance(message, Following)
        if not signals:
            continue
        if asked is None:
            asked = time.monotonic()
            log.info("goes on until rank 0 ends, at most %g s", grace)
        if len(signals) > 1 or time.monotonic() - asked > (grace if following else _START_GRACE):
            return 1 if following else 0
    code = exits.get()
    if code == 0 or (signals and not following):  # a start that was called off ends as rank 0 happens to end
        return 0
    time.sleep(_LAST_WORDS)
    _messages(process, config.node_rank)
    raise EngineDeadError(process.verdict or _reason(process.name, config.node_rank, code))


def _messages(process: EngineProcess, rank: int | None) -> list[Any]:
    """What the process says, logged. Raises what it died of."""
    found = []
    while (message := process.receive()) is not None:
        found.append(message)
        match message:
            case Progress():
                log.info("%s", message.message)
            case Following():
                log.info("rank %s is ready, and does what rank 0 says", rank)
            case Dead():
                kind = ModelError if message.model else ConfigError if message.config else EngineDeadError
                raise kind(message.message)
    return found


def _reason(name: str, rank: int | None, code: int) -> str:
    if code == -signal.SIGABRT:  # JAX's service lives in rank 0's process; its clients abort when they lose it
        return f"rank 0 is lost: JAX's service there is gone and has ended rank {rank} (signal {-code})"
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{name} {how}"
