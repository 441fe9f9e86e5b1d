"""``lmjax serve`` as a process on a fixture model, and plain HTTP requests to it."""

from __future__ import annotations

import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fixtures import model_dir
from tests.server.helpers import events

ROOT = Path(__file__).parents[2]
# few shapes, so that a start compiles few programs
SMALL = {
    "--max-num-seqs": "4",
    "--max-num-batched-tokens": "64",
    "--num-gpu-blocks-override": "256",
    "--dtype": "float32",
}


@dataclass
class Reply:
    status: int
    headers: Any
    body: bytes
    seconds: float

    @functools.cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    @functools.cached_property
    def events(self) -> list[dict[str, Any]]:
        return events(self.body.decode())

    @functools.cached_property
    def chunks(self) -> list[dict[str, Any]]:
        """The events that have choices, or the one body of a plain answer."""
        return [e for e in self.events if e["choices"]] if self.is_stream else [self.json]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    @property
    def indices(self) -> list[int]:
        return sorted({c["index"] for chunk in self.chunks for c in chunk["choices"]})

    def text(self, index: int = 0) -> str:
        return "".join(_text(choice) for choice in self.choices(index))

    @property
    def texts(self) -> list[str]:
        return [self.text(index) for index in self.indices]

    def finish_reason(self, index: int = 0) -> str | None:
        return next((c["finish_reason"] for c in self.choices(index) if c["finish_reason"]), None)

    @property
    def usage(self) -> dict[str, Any]:
        return self.events[-1]["usage"] if self.is_stream else self.json["usage"]

    def logprobs(self, key: str, index: int = 0) -> list[Any]:
        return [value for choice in self.choices(index) if choice["logprobs"] for value in choice["logprobs"][key]]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta", {})).get("content") or ""


@dataclass
class LiveServer:
    fixture: str
    flags: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)  # sent with every request that does not bring its own

    def __post_init__(self) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(self.command(), cwd=ROOT, stdout=self.log, stderr=self.log)
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise

    def command(self) -> list[str]:
        flags = dict(SMALL) | dict(zip(self.flags[::2], self.flags[1::2], strict=True))
        return [
            *(sys.executable, "-m", "lmjax.cli", "serve", "--model", str(model_dir(self.fixture))),
            *("--served-model-name", self.fixture, "--host", "127.0.0.1", "--port", str(self.port)),
            *(part for flag in flags.items() for part in flag),
        ]

    def wait_ready(self, seconds: float = 800.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.send("GET", "/ready").status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{self.logged()[-4000:]}")
            time.sleep(0.1)

    def logged(self) -> str:
        return os.pread(self.log.fileno(), 10_000_000, 0).decode(errors="replace")

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 120.0
    ) -> Reply:
        """``body``: bytes as they are, or anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json"} | (self.headers if headers is None else headers)
        start = time.monotonic()
        try:
            connection.request(method, path, data, all_headers)
            response = connection.getresponse()
            text = response.read()
            return Reply(response.status, response.headers, text, time.monotonic() - start)
        finally:
            connection.close()

    def complete(self, **body: Any) -> Reply:
        return self.send("POST", "/v1/completions", {"model": self.fixture, "temperature": 0, "prompt": "x"} | body)

    @functools.cached_property
    def known_text(self) -> str:
        return self.complete(max_tokens=8).text()

    def check_alive(self) -> None:
        assert self.send("GET", "/health").status == 200
        reply = self.complete(max_tokens=8)
        assert reply.status == 200 and reply.text() == self.known_text

    def metrics(self) -> dict[str, float]:
        """The engine's own gauges and counters, without prefix and labels."""
        lines = self.send("GET", "/metrics").body.decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("lmjax:"))
        return {name.split(":")[1].split("{")[0]: float(value) for name, value in pairs}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


class Servers:
    """The server of one set-up; asking for another one ends it and starts the next."""

    def __init__(self) -> None:
        self._setup: tuple[str, tuple[str, ...]] | None = None
        self._server: LiveServer | None = None
        self._failed: dict[Any, str] = {}  # a start that failed is not tried again for every test

    def get(self, fixture: str, flags: tuple[str, ...]) -> LiveServer:
        if (fixture, flags) != self._setup or self._server is None:
            self.close()
            assert (fixture, flags) not in self._failed, self._failed[fixture, flags]
            headers = {"Authorization": "Bearer sk-test"} if "sk-test" in flags else {}
            try:
                self._server, self._setup = LiveServer(fixture, flags, headers), (fixture, flags)
            except AssertionError as error:
                self._failed[fixture, flags] = str(error)
                raise
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
