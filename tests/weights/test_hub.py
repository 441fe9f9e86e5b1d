"""Hub models, against a local stand-in; in a subprocess each, as the hub's client reads its environment at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.weights.checkpoints import LLAMA, tensors, write_hf
from tests.weights.hub_stub import COMMIT, hub

SCRIPT = """
import sys
from lmjax.weights.errors import WeightError
from lmjax.weights.source import resolve_model
try:
    source = resolve_model(sys.argv[1], sys.argv[2] or None, sys.argv[3] or None)
except WeightError as error:
    sys.exit(f"error: {error}")
print(source.path)
"""


@pytest.fixture
def repository(tmp_path):
    path = write_hf(tmp_path / "repo", LLAMA, tensors(LLAMA))
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("x")
    for unwanted in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/config.json",
    ):
        (path / unwanted).parent.mkdir(exist_ok=True)
        (path / unwanted).write_text("{}")
    return path


@pytest.fixture
def resolve(tmp_path):
    def run(name, endpoint, revision="", download_dir="", **env):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))} | {
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "no_proxy": "127.0.0.1",
            **env,
        }
        command = [sys.executable, "-c", SCRIPT, name, revision, download_dir]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]

    return run


def test_fetches_what_is_needed_and_only_once(repository, resolve, tmp_path):
    with hub(repository) as (endpoint, requests):
        path = resolve("org/tiny", endpoint, download_dir=str(tmp_path / "models"))
        assert path.startswith(str(tmp_path / "models")) and path.endswith(COMMIT)
        assert sorted(os.listdir(path)) == [
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert json.loads(Path(path, "config.json").read_text()) == LLAMA
        requests.clear()
        assert resolve("org/tiny", endpoint, download_dir=str(tmp_path / "models")) == path
        assert not any(request.startswith("GET /org") for request in requests)
    # and now without the hub
    assert resolve("org/tiny", "http://127.0.0.1:9", download_dir=str(tmp_path / "models")) == path
    assert resolve("org/tiny", endpoint, download_dir=str(tmp_path / "models"), HF_HUB_OFFLINE="1") == path


def test_token_and_revision(repository, resolve):
    with hub(repository, token="hf_secret") as (endpoint, requests):
        assert "no such model" in resolve("org/tiny", endpoint)
        assert resolve("org/tiny", endpoint, revision="v1", HF_TOKEN="hf_secret").endswith(COMMIT)
        assert any("/revision/v1" in request for request in requests)
        message = resolve("org/tiny", endpoint, revision="v2", HF_TOKEN="hf_secret")
        assert message.startswith("error: 'org/tiny'") and "revision 'v2'" in message


def test_unknown_and_gated(repository, resolve):
    with hub(repository) as (endpoint, _):
        message = resolve("org/other", endpoint)
        assert message.startswith("error: 'org/other'") and "no such model" in message
    with hub(repository, gated=True) as (endpoint, _):
        assert "licence" in resolve("org/tiny", endpoint)


def test_unreachable_or_offline(resolve):
    message = resolve("org/tiny", "http://127.0.0.1:9")
    assert (
        message.startswith("error: 'org/tiny'") and "http://127.0.0.1:9" in message and "cannot be reached" in message
    )
    message = resolve("org/tiny", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert message.startswith("error: 'org/tiny'") and "HF_HUB_OFFLINE" in message
