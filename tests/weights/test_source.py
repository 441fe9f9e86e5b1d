from __future__ import annotations

import json

import pytest

from lmjax.weights.errors import WeightError
from lmjax.weights.source import resolve_model
from tests.weights.checkpoints import LLAMA, tensors, write_gguf


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def fails(model, *words):
    with pytest.raises(WeightError) as caught:
        resolve_model(str(model))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_directory(directory):
    source = resolve_model(str(directory))
    assert (source.path, source.weights, source.kind) == (directory, directory, "hf")
    assert source.config == LLAMA and source.generation_config == {}
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    assert resolve_model(str(directory)).generation_config == {"temperature": 0.5}


def test_home_is_expanded(directory, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    assert resolve_model(f"~/{directory.name}").path == directory


def test_overrides_replace_top_level_keys(directory):
    config = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (directory / "config.json").write_text(json.dumps(config))
    changes = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rms_norm_eps": 1e-6}
    assert resolve_model(str(directory), hf_overrides=changes).config == config | changes


def test_existing_path_wins_over_a_hub_name(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    (directory / "sub").mkdir()
    (directory / "sub" / "config.json").write_text("{}")
    assert resolve_model(f"{directory.name}/sub").config == {}


@pytest.mark.parametrize("name", ["/no/such/model", "./models/x", "model", "a/b/c", "x.gguf", "org/x.gguf", ""])
def test_no_such_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(name, repr(name), "'smollm2'", "config.json", ".gguf") if name else fails(name, "config.json")


def test_not_a_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    fails(tmp_path / "weights.bin", "weights.bin", "not a .gguf file")
    fails(tmp_path, str(tmp_path), "no config.json")
    write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA))
    fails(tmp_path, "no config.json", "m.gguf")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json(directory, name, content):
    (directory / name).write_bytes(content)
    fails(directory, name)


def test_lfs_pointer(directory):
    (directory / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    fails(directory, "config.json", "git-LFS")


def test_unreadable(directory, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    fails(directory, "config.json", "Permission denied")
