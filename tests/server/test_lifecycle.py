"""A server process from its start to its end, on a FakeEngine."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.app import ServerSettings, SettingsError
from tests.server.helpers import events, joined

ROOT = Path(__file__).parents[2]
LONG = {"model": "fake", "prompt": "x", "max_tokens": 900, "stream": True}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Process:
    def __init__(self, settings: dict[str, Any], engine: dict[str, Any]):
        self.port = settings.setdefault("port", free_port())
        settings.setdefault("host", "127.0.0.1")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.server.fake_server", json.dumps(settings), json.dumps(engine)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any], Any]:
        connection = self.connect()
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text), response.headers

    def status(self, path: str) -> int | None:
        try:
            return self.call("GET", path)[0]
        except OSError:
            return None

    def wait(self, path: str, status: int, seconds: float = 20.0) -> None:
        until(lambda: self.status(path) == status, seconds)

    def end(self, seconds: float = 15.0) -> tuple[int, str]:
        _, stderr = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, stderr


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(settings: dict[str, Any] | None = None, **engine: Any) -> Process:
        started.append(Process(settings or {}, engine))
        return started[-1]

    yield make
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, process: Process, body: dict[str, Any] = LONG):
        super().__init__()
        self.connection, self.text, self.started = process.connect(), b"", threading.Event()
        self.body = body
        self.start()
        assert self.started.wait(10)

    def run(self) -> None:
        self.connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        self.text = response.readline()
        self.started.set()
        self.text += response.read()
        self.connection.close()

    def events(self, done: bool) -> list[dict[str, Any]]:
        self.join(20)
        return events(self.text.decode(), done)


def test_loading_then_ready_then_sigterm(start: Callable[..., Process]) -> None:
    process = start(load=1.5)
    process.wait("/health", 200)
    assert process.status("/ready") == 503
    status, body, headers = process.call("POST", "/v1/completions", LONG)
    assert status == 503 and "loading" in body["error"]["message"] and headers["Retry-After"]
    assert process.status("/v1/models") == 503
    process.wait("/ready", 200)
    assert process.call("GET", "/v1/models")[1]["data"][0]["id"] == "fake"
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0


def test_a_busy_port_is_one_line_before_anything_is_loaded(start: Callable[..., Process]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        process = start({"port": sock.getsockname()[1]}, load=30)
        stdout, stderr = process.popen.communicate(timeout=10)
    assert process.popen.returncode == 1
    assert "loading" not in stdout
    assert len(stderr.strip().splitlines()) == 1
    assert str(process.port) in stderr and "in use" in stderr


def test_a_failed_load_ends_the_process(start: Callable[..., Process]) -> None:
    process = start(load=0.2, fail="there is no model here")
    code, stderr = process.end()
    assert code != 0 and "there is no model here" in stderr


def test_sigterm_while_loading(start: Callable[..., Process]) -> None:
    process = start(load=60)
    process.wait("/health", 200)
    process.popen.send_signal(signal.SIGTERM)
    assert process.end(5)[0] == 0


def test_draining_lets_running_requests_finish(start: Callable[..., Process]) -> None:
    process = start({"shutdown_timeout": 15}, script=False, step=0.01)
    process.wait("/ready", 200)
    reader = Reader(process, LONG | {"max_tokens": 150})
    process.popen.send_signal(signal.SIGTERM)
    process.wait("/ready", 503)
    assert process.status("/health") == 200
    status, body, headers = process.call("POST", "/v1/completions", LONG)
    assert status == 503 and "shutting down" in body["error"]["message"] and headers["Retry-After"]
    assert len(joined(reader.events(done=True))) == 150
    assert process.end()[0] == 0


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_what_runs_too_long_is_aborted_with_a_clean_end(start: Callable[..., Process], how: str) -> None:
    process = start({"shutdown_timeout": 0.5 if how == "timeout" else 60}, script=False, step=0.02)
    process.wait("/ready", 200)
    streamed = Reader(process)
    with ThreadPoolExecutor(1) as pool:
        plain = pool.submit(process.call, "POST", "/v1/completions", LONG | {"stream": False})
        until(lambda: _running(process) == 2, 5)
        _end_in_haste(process, how)
    *chunks, last = streamed.events(done=False)
    assert chunks and "shutting down" in last["error"]["message"]
    status, body, _ = plain.result()
    assert status == 503 and "shutting down" in body["error"]["message"]
    assert process.end(8)[0] == 0


def _running(process: Process) -> float:
    connection = process.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return float(re.findall(r"^lmjax:num_requests_running\{.*\} (.*)$", text, re.M)[0])


def _end_in_haste(process: Process, how: str) -> None:
    process.popen.send_signal(signal.SIGTERM)
    if how != "timeout":
        process.wait("/ready", 503)
        process.popen.send_signal(signal.SIGTERM)


def test_the_engines_death_ends_the_process(start: Callable[..., Process]) -> None:
    process = start(script=False, step=0.02, die_after=1.5)
    process.wait("/ready", 200)
    streamed = Reader(process)
    *chunks, last = streamed.events(done=False)
    died = time.monotonic()
    assert chunks and "signal 9" in last["error"]["message"]
    assert process.status("/health") == 503
    code, stderr = process.end(10)
    assert code == 1 and time.monotonic() - died < 10 and "signal 9" in stderr


def test_a_unix_socket(start: Callable[..., Process], tmp_path: Path) -> None:
    path = tmp_path / "s"
    for _ in range(2):  # the second time over the socket that the first has left
        process = start({"uds": str(path)})
        until(lambda: path.is_socket() and _ask_socket(path) == b"HTTP/1.1 200 OK", 20)
        process.popen.kill()
        process.popen.wait()
    file = tmp_path / "f"
    file.write_text("mine")
    code, stderr = start({"uds": str(file)}).end()
    assert code == 1 and len(stderr.strip().splitlines()) == 1 and file.read_text() == "mine"


def _ask_socket(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return b""
        sock.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return sock.recv(100).split(b"\r\n")[0]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program to make a certificate")
def test_tls(start: Callable[..., Process], tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-keyout",
    ]
    subprocess.run([*make, key, "-out", cert], check=True, capture_output=True)
    process = start({"ssl_certfile": cert, "ssl_keyfile": key})
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False

    def ready() -> bool:
        connection = http.client.HTTPSConnection("127.0.0.1", process.port, timeout=5, context=context)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except ConnectionError:
            return False
        finally:
            connection.close()

    until(ready, 20)


def test_the_server_loads_no_engine() -> None:
    """The layers below the protocol (and jax) stay out of the front end."""
    code = "import sys, server.app; print([m for m in sys.modules if m.split('.')[0] in ('jax', 'torch', 'flax')"
    code += " or m.startswith(('lmjax.core', 'lmjax.runtime', 'lmjax.engine', 'lmjax.models'))])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"port": 70000}, "--port"),
        ({"api_keys": ("é",)}, "--api-key"),
        ({"root_path": "x/"}, "--root-path"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout"),
        ({"metrics_prefix": "a:b"}, "--metrics-prefix"),
        ({"metrics_prefix": ""}, "--metrics-prefix"),
        ({"ssl_certfile": "x"}, "--ssl-certfile"),
        ({"ssl_certfile": "x", "ssl_keyfile": "y"}, "--ssl-certfile"),
        ({"log_level": "loud"}, "--log-level"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(SettingsError, match=flag):
        ServerSettings(**settings).validate()
