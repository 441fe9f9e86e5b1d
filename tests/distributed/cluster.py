"""One engine in two processes behind one server, started by the scripts that users start it with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.server.live_server import LiveServer

LMJAX = f"{sys.executable} -m lmjax.cli"
LOCAL = ("scripts/launch_local.sh", "2", "2", "-b", "env BEFORE=%")
# few programs; a pool in which four long requests do not fit
FLAGS = {
    "--max-num-seqs": "4",
    "--max-num-batched-tokens": "8",
    "--num-gpu-blocks-override": "14",
    "--max-model-len": "128",
    "--dtype": "float32",
}


def flags(changes: dict[str, str] | None = None) -> tuple[str, ...]:
    return tuple(part for pair in (FLAGS | (changes or {})).items() for part in pair)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def children(pid: int) -> list[int]:
    """In the order in which they were started. A thread's, too."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found |= {int(child) for child in path.read_text().split()}
    return sorted(found)


def is_running(pid: int) -> bool:
    """Not ended, nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Cluster(LiveServer):
    """``launcher``: what stands before the flags of ``lmjax serve``; 2 processes of ``devices``."""

    launcher: tuple[str, ...] = LOCAL

    def command(self) -> list[str]:
        serve = super().command()
        given = serve[serve.index("serve") + 1 :]
        self.master_port = free_port()
        environment = [f"LMJAX={LMJAX}", f"MASTER_PORT={self.master_port}"]
        return ["env", *environment, *self.launcher, *given]

    def wait_ready(self, seconds: float = 800.0) -> None:
        super().wait_ready(seconds)
        while "does what rank 0 says" not in self.logged():
            time.sleep(0.1)
        # now, while all live: a front end is a python whose child is a python
        self.fronts = [pid for pid in self._descendants() if _is_rank(pid)]
        self.engines = [children(pid)[0] for pid in self.fronts]
        assert len(self.fronts) == 2, self.fronts

    def _descendants(self) -> list[int]:
        found, left = [], [self.process.pid]
        while left:
            pid = left.pop(0)
            found.append(pid)
            left += children(pid)
        return found

    def processes(self) -> dict[str, int]:
        """Front ends and engines by rank: "front 0", "engine 1", ..."""
        ranked = sorted(self.fronts, key=_node_rank)
        return {f"front {i}": pid for i, pid in enumerate(ranked)} | {
            f"engine {i}": children(pid)[0] for i, pid in enumerate(ranked)
        }

    def ended_in(self, seconds: float) -> int:
        """The launcher's status; nothing may be left by then, but for an engine that says its last words."""
        status = self.process.wait(seconds)
        deadline = time.monotonic() + 3.0
        while left := [pid for pid in (*self.fronts, *self.engines) if is_running(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(45)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for pid in (*getattr(self, "fronts", ()), *getattr(self, "engines", ())):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def _is_rank(pid: int) -> bool:
    return "lmjax.cli" in _arguments(pid) and "python" in _arguments(pid)[0]


def _node_rank(pid: int) -> int:
    """From the flags, or from what the launcher told."""
    arguments = _arguments(pid)
    if "--node-rank" in arguments:
        return int(arguments[arguments.index("--node-rank") + 1])
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return int(next(line for line in environment if line.startswith("SLURM_PROCID=")).split("=")[1])


def start(launcher: tuple[str, ...] = LOCAL, **changes: str) -> Cluster:
    return Cluster("RAND", flags(changes), launcher=launcher)
