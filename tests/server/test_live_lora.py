"""``lmjax serve`` with a real tiny model and adapters that come and go over HTTP while it answers.

What an adapter should say is what the same server says with weights into which the adapter was merged.
"""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.fixtures import model_dir
from tests.peft_dirs import make_adapter, merged_model
from tests.server.http_checks import at_once
from tests.server.live_server import LiveServer, Reply

pytestmark = pytest.mark.timeout(900)
ADMIN = {"Authorization": "Bearer sk-admin"}
PROMPTS = ("hello", "What is the answer to all of this?", "a" * 40)
NAMES = ("first", "b", "c", "d")
TOKENS = 16


class Adapters:
    """A server whose ``--lora-dir`` has the adapters NAMES; ``first`` is there from the start. ``said``: the text of
    each name (RAND: the model itself) and prompt."""

    def __init__(self, root: Path):
        self.folder, self.root = root / "loras", root
        for seed, name in enumerate(NAMES):
            make_adapter(self.folder / name, seed=seed, rank=(4, 8, 3, 1)[seed])
        settings = {
            "enable-lora": True,
            "max-loras": 2,
            "max-lora-rank": 8,
            "max-cpu-loras": 5,
            "lora-modules": {"first": str(self.folder / "first")},
            "lora-dir": str(self.folder),
            "admin-api-key": ["sk-admin"],
        }
        (root / "config.json").write_text(json.dumps(settings))
        # few programs: every forward one has a form with adapters and one without
        flags = ("--config", str(root / "config.json"), "--max-model-len", "512", "--max-num-batched-tokens", "8")
        self.server = LiveServer("RAND", flags)
        self.said: dict[tuple[str, str], str] = {}

    def read_merged(self) -> None:
        for name in NAMES:
            path = merged_model(self.root / f"{name}-merged", self.folder / name)
            assert self.admin("/v1/weights", path=str(path)).status == 200
            self._note("RAND", name)
        assert self.admin("/v1/weights", path=str(model_dir("RAND"))).status == 200
        self._note("RAND", "RAND")
        assert len(set(self.said.values())) == len(PROMPTS) * (len(NAMES) + 1)

    def _note(self, model: str, name: str) -> None:
        for prompt, text in zip(PROMPTS, at_once(lambda prompt: self.text(model, prompt), PROMPTS), strict=True):
            self.said[name, prompt] = text

    def admin(self, route: str, /, **body: Any) -> Reply:
        return self.server.send("POST", route, body, ADMIN)

    def load(self, name: str, path: str | None = None, status: int = 200) -> Reply:
        reply = self.admin("/v1/load_lora_adapter", lora_name=name, lora_path=path or name)
        assert reply.status == status, reply.body
        return reply

    def unload(self, name: str, status: int = 200) -> None:
        assert self.admin("/v1/unload_lora_adapter", lora_name=name).status == status

    def ask(self, model: str, prompt: Any, **body: Any) -> Reply:
        asked = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
        return self.server.complete(**asked | body)

    def text(self, model: str, prompt: str, **body: Any) -> str:
        reply = self.ask(model, prompt, **body)
        assert reply.status == 200, reply.body[:300]
        return reply.text()

    def hang_up(self, model: str, prompt: str) -> int:
        """A client that goes in the middle of a long stream. Returns the status."""
        body = {"model": model, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read(20)
            return response.status
        finally:
            connection.close()

    def there(self) -> int:
        """Requests that the engine has."""
        numbers = self.server.metrics()
        return int(numbers["num_requests_running"] + numbers["num_requests_waiting"])

    def idle(self) -> None:
        """Waits until no request is left, and nothing that one held."""
        deadline = time.monotonic() + 30
        nothing = 'running_lora_adapters="",waiting_lora_adapters=""'
        while True:
            numbers = self.server.metrics()
            left = [numbers[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
            if not any(left) and any(nothing in line for line in _lines(self)):
                return
            assert time.monotonic() < deadline, (left, [line for line in _lines(self) if "lora" in line])
            time.sleep(0.1)

    @property
    def names(self) -> list[str]:
        return [card["id"] for card in self.server.send("GET", "/v1/models").json["data"]]


@pytest.fixture(scope="module")
def live(_compile_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    made = Adapters(tmp_path_factory.mktemp("live-lora"))
    try:
        made.read_merged()
        yield made
    finally:
        made.server.close()


@pytest.fixture
def only_first(live: Adapters) -> Iterator[Adapters]:
    assert live.names == ["RAND", "first"]
    yield live
    for name in live.names[1:]:
        if name != "first":
            live.unload(name)
    assert live.server.metrics()["compiles_total"] == 0


def test_mixed_answers_are_those_of_merged_weights(only_first: Adapters) -> None:
    live = only_first
    for name in NAMES[1:]:
        live.load(name)
    assert live.names == ["RAND", *NAMES]
    cards = {card["id"]: card for card in live.server.send("GET", "/v1/models").json["data"]}
    assert {cards[name]["parent"] for name in NAMES} == {"RAND"} and cards["b"]["root"] == str(live.folder / "b")
    # four adapters, two places on the device, four requests at a time; every pair twice, so from the prefix cache, too
    pairs = [pair for pair in live.said for _ in range(2)]
    assert at_once(lambda pair: live.text(*pair), pairs) == [live.said[pair] for pair in pairs]
    streams = at_once(lambda pair: live.text(*pair, stream=True), pairs[::3])
    assert streams == [live.said[pair] for pair in pairs[::3]]
    several = live.ask("c", list(PROMPTS))
    assert several.texts == [live.said["c", prompt] for prompt in PROMPTS]
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "temperature": 0}

    def chat(name: str) -> str:
        return live.server.send("POST", "/v1/chat/completions", message | {"model": name}).text()

    together = at_once(chat, ("RAND", *NAMES))
    assert len(set(together)) == len(NAMES) + 1 and [chat(name) for name in ("RAND", *NAMES)] == together
    metric = next(line for line in _lines(live) if line.startswith("lmjax:lora_requests_info{"))
    assert 'max_lora="2"' in metric and 'running_lora_adapters=""' in metric


def _lines(live: Adapters) -> list[str]:
    return live.server.send("GET", "/metrics").body.decode().splitlines()


def test_they_come_and_go_under_traffic(only_first: Adapters) -> None:
    """``d`` and ``b`` are loaded, unloaded and loaded again, while six clients ask for whatever they find, and now and
    then go before they have it."""
    live, stop = only_first, threading.Event()
    counts = {"right": 0, "gone": 0, "hung up": 0}

    def client(number: int) -> None:
        turn = number
        while not stop.is_set():
            turn += 1
            name, prompt = ("RAND", *NAMES)[turn % 5], PROMPTS[turn % 3]
            if turn % 7 == 0:
                counts["hung up"] += live.hang_up(name, prompt) == 200
                continue
            reply = live.ask(name, prompt, stream=number % 2 == 0)
            if reply.status == 404 and name in NAMES[1:]:
                counts["gone"] += 1
                continue
            assert reply.status == 200, (name, reply.body[:300])
            assert reply.text() == live.said[name, prompt], (name, prompt)
            assert reply.finish_reason() == "length"
            counts["right"] += 1

    def operator() -> None:
        try:
            for turn in range(10):
                for name in ("d", "b"):
                    live.load(name)
                    time.sleep(0.1)
                    if turn % 2:
                        live.load("broken", "no/such", 400)
                for name in ("b", "d"):
                    live.unload(name)
        finally:
            stop.set()

    jobs: list[Callable[[], None]] = [operator, *(lambda n=n: client(n) for n in range(6))]  # type: ignore[misc]

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:
            stop.set()
            raise

    at_once(run, jobs)
    assert counts["right"] >= 40 and counts["gone"] >= 2 and counts["hung up"] >= 5, counts
    assert live.names == ["RAND", "first"]
    live.idle()


def test_requests_that_are_there_finish_and_new_ones_are_404(only_first: Adapters) -> None:
    live = only_first
    live.load("b")
    asked = {"max_tokens": 300, "return_token_ids": True}
    alone = live.text("b", PROMPTS[0], **asked)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(live.text("b", PROMPTS[0], **asked))) for _ in range(6)
    ]  # two of them wait
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    waiting = 'running_lora_adapters="b",waiting_lora_adapters="b"'
    while live.there() < len(threads) or not any(waiting in line for line in _lines(live)):
        assert time.monotonic() < deadline, [line for line in _lines(live) if "lora" in line]
    live.unload("b")
    for reply in (live.ask("b", "x"), live.ask("b", "x", stream=True), live.server.send("GET", "/v1/models/b")):
        assert reply.status == 404 and reply.json["error"]["code"] == "model_not_found"
    live.unload("b", 404)
    live.load("b", "c")  # another one of that name, at once
    assert live.text("b", PROMPTS[0]) == live.said["c", PROMPTS[0]]
    for thread in threads:
        thread.join(120)
    assert found == [alone] * 6


def test_a_name_with_other_weights_finds_nothing_of_the_old_ones(only_first: Adapters) -> None:
    live, prompt = only_first, PROMPTS[1] * 4
    said = []
    for path in ("b", "c", "b"):
        live.load("x", path)
        reply = live.ask("x", prompt)
        assert reply.usage["prompt_tokens_details"]["cached_tokens"] == 0
        said.append(reply.text())
        assert live.ask("x", prompt).usage["prompt_tokens_details"]["cached_tokens"] > 0
        live.unload("x")
    assert said[0] == said[2] != said[1]


def test_a_bad_adapter_is_a_400_and_nothing_else_changes(only_first: Adapters) -> None:
    live = only_first
    outside = make_adapter(live.root / "outside")

    def spoilt(name: str, edit: Callable[[Path], None] = lambda path: None, **kwargs: Any) -> str:
        path = make_adapter(live.folder / name, **kwargs)
        edit(path)
        return name

    def tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
        def edit(path: Path) -> None:
            file = path / "adapter_model.safetensors"
            found = load_file(file)
            change(found)
            save_file(found, file)

        return edit

    def cut(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])

    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    bad = {
        spoilt("rank", rank=16): "16",
        spoilt("shape", tensors(lambda t: t.update({first: t[first][:, :-1].copy()}))): "q_proj",
        spoilt("module", config={"target_modules": ["q_proj", "nope"]}): "nope",
        spoilt("layer", tensors(lambda t: t.update({first.replace("layers.0", "layers.9"): t[first]}))): "layers.9",
        spoilt("half", tensors(lambda t: t.pop(first))): "q_proj",
        spoilt("dora", config={"use_dora": True}): "use_dora",
        spoilt("kind", config={"peft_type": "IA3"}): "peft_type",
        spoilt("cut", cut): "adapter_model.safetensors",
        spoilt("no-weights", lambda path: (path / "adapter_model.safetensors").unlink()): "adapter_model.safetensors",
        spoilt("no-config", lambda path: (path / "adapter_config.json").unlink()): "adapter_config.json",
        spoilt("no-json", lambda path: (path / "adapter_config.json").write_text("{") and None): "adapter_config.json",
        "nope": "lora_path",
        str(outside): "lora_path",
        "../outside": "lora_path",
    }
    before = live.server.send("GET", "/v1/models").json
    texts = [live.text(name, PROMPTS[0]) for name in ("RAND", "first")]
    for path, said in bad.items():
        error = live.load("new", path, 400).json["error"]
        assert said in error["message"] and error["type"] == "invalid_request_error", (path, error)
        assert error["param"] == "lora_path", error
    assert live.load("first", "b", 400).json["error"]["param"] == "lora_name"
    assert live.load("RAND", "b", 400).json["error"]["param"] == "lora_name"
    for i in range(4):  # --max-cpu-loras 5
        live.load(f"n{i}", "b")
    assert "--max-cpu-loras" in live.load("new", "b", 400).json["error"]["message"]
    for i in range(4):
        live.unload(f"n{i}")
    assert live.server.send("GET", "/v1/models").json == before
    assert [live.text(name, PROMPTS[0]) for name in ("RAND", "first")] == texts
    assert live.ask("new", "x").status == 404
    for path in bad:
        shutil.rmtree(live.folder / path, ignore_errors=True)


def test_adapters_outlive_sleep(only_first: Adapters) -> None:
    live = only_first
    live.load("b")
    for level in (1, 2):
        assert live.server.send("POST", f"/sleep?level={level}", None, ADMIN).status == 200
        if level == 2:
            live.load("c")
        assert live.server.send("POST", "/wake_up", None, ADMIN).status == 200
        for name in ("first", "b", "RAND"):
            assert live.text(name, PROMPTS[0]) == live.said[name, PROMPTS[0]]
    assert live.text("c", PROMPTS[0]) == live.said["c", PROMPTS[0]]
