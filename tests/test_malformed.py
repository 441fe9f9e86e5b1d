"""Malformed checkpoints: ``lmjax serve`` says in one line which file is at fault and why, and ends with code 1.

Each case is a good checkpoint with one thing broken. All go through ``LLM``; the command line is tried with all as
well, in this process, its engine in one of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmjax import LLM
from lmjax.types import ModelError
from tests.fixtures import make_model

ROOT = Path(__file__).parents[1]
INDEX, FIRST, SECOND = (
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
SINGLE, UP = "model.safetensors", "model.layers.0.mlp.up_proj.weight"


def edit_json(name: str, **changes) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not ...}))

    return edit


def edit_tensors(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / SINGLE)
        change(tensors)
        save_file(tensors, path / SINGLE)

    return edit


def edit_header(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        raw = (path / SINGLE).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        new = json.dumps(header).encode()
        (path / SINGLE).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

    return edit


def replaced(start: int, new: bytes) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        raw = bytearray((path / SINGLE).read_bytes())
        raw[start : start + len(new)] = new
        (path / SINGLE).write_bytes(raw)

    return edit


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        (path / name).write_bytes(content)

    return edit


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def both(*edits: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        for one in edits:
            one(path)

    return edit


def cut(path: Path) -> None:
    os.truncate(path / SINGLE, (path / SINGLE).stat().st_size - 100)


def shard(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    names = sorted(tensors)
    parts = {FIRST: names[::2], SECOND: names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (path / SINGLE).unlink()


def only_pickles(path: Path) -> None:
    (path / SINGLE).rename(path / "pytorch_model.bin")


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def with_value(value: float, name: str = UP) -> Callable[[Path], None]:
    def change(tensors: dict) -> None:
        tensors[name].reshape(-1)[tensors[name].size // 2] = value

    return edit_tensors(change)


def with_tensor(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({name: np.ascontiguousarray(make(tensors[name]))}))


# name -> (what breaks it, the file that the line names, words of the cause)
CASES: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...]]] = {
    "missing shard": (both(shard, remove(SECOND)), SECOND, ("is missing", "2 shards")),
    "index is no JSON": (both(shard, write(INDEX, b"{")), INDEX, ("weight_map",)),
    "index names another shard": (
        both(shard, edit_json(INDEX, weight_map={"model.norm.weight": SECOND})),
        SECOND,
        ("tensor model.norm.weight is missing", INDEX),
    ),
    "truncated file": (cut, SINGLE, ("the file is cut",)),
    "empty file": (write(SINGLE, b""), SINGLE, ("0 bytes",)),
    "header is no JSON": (replaced(8, b"}"), SINGLE, ("header is not JSON",)),
    "header too long": (replaced(0, struct.pack("<Q", 1 << 40)), SINGLE, ("header length 1099511627776",)),
    "offsets out of range": (
        edit_header(lambda header: header[UP].update(data_offsets=[1 << 30, (1 << 30) + 4])),
        SINGLE,
        (UP, "do not hold"),
    ),
    "offsets overlap": (
        edit_header(lambda header: header[UP].update(data_offsets=header["model.norm.weight"]["data_offsets"])),
        SINGLE,
        (UP,),
    ),
    "wrong shape": (with_tensor(UP, lambda a: a[1:]), SINGLE, (UP, "the config asks for")),
    "missing tensor": (edit_tensors(lambda tensors: tensors.pop(UP)), "", (UP, "is missing")),
    "unknown dtype": (edit_header(lambda header: header[UP].update(dtype="F4")), SINGLE, (UP, "'F4'", "BF16")),
    "integer weights": (with_tensor(UP, lambda a: a.astype(np.int32)), SINGLE, (UP, "I32", "not supported")),
    "unknown model type": (
        edit_json("config.json", model_type="gpt5"),
        "config.json",
        ("model_type: got 'gpt5'", "llama"),
    ),
    "no model type": (edit_json("config.json", model_type=...), "config.json", ("model_type",)),
    "wrong config value": (
        edit_json("config.json", num_attention_heads="many"),
        "config.json",
        ("num_attention_heads: got 'many'",),
    ),
    "config is no JSON": (write("config.json", b"{'a': 1}"), "config.json", ("is not JSON",)),
    "config is a list": (write("config.json", b"[]"), "config.json", ("must be an object",)),
    "no config": (remove("config.json"), "", ("has no config.json",)),
    "generation config is no JSON": (write("generation_config.json", b"nope"), "generation_config.json", ("not JSON",)),
    "no tokenizer": (remove("tokenizer.json"), "", ("has no tokenizer", "tokenizer.json")),
    "tokenizer is damaged": (write("tokenizer.json", b'{"model": 3}'), "tokenizer.json", ("not a valid tokenizer",)),
    "tokenizer config is no JSON": (
        write("tokenizer_config.json", b"{]"),
        "tokenizer_config.json",
        ("is not valid JSON",),
    ),
    "chat template is a list": (write("chat_template.json", b"[]"), "chat_template.json", ("JSON object",)),
    "NaN": (with_value(np.nan), SINGLE, (UP, "NaN")),
    "NaN in a norm": (with_value(np.nan, "model.norm.weight"), SINGLE, ("model.norm.weight", "NaN")),
    "infinite": (with_value(-np.inf), SINGLE, (UP, "infinite")),
    "vocabulary larger than the head": (
        with_tensor("lm_head.weight", lambda a: a[:-16]),
        SINGLE,
        ("lm_head.weight", "the config asks for"),
    ),
    "vocabulary larger than the embedding": (
        edit_json("config.json", vocab_size=1 << 20),
        SINGLE,
        ("model.embed_tokens.weight", "1048576"),
    ),
    "tokens beyond the embedding": (
        both(
            with_tensor("lm_head.weight", lambda a: a[:64]),
            with_tensor("model.embed_tokens.weight", lambda a: a[:64]),
            edit_json("config.json", vocab_size=64),
        ),
        "config.json",
        ("vocab_size is 64", "tokenizer"),
    ),
    "empty directory": (emptied, "", ("has no config.json",)),
    "no weights": (remove(SINGLE), "", ("no weights", SINGLE)),
    "pickles only": (only_pickles, "pytorch_model.bin", ("can run code", ".safetensors")),
    "git-LFS pointer": (
        write(SINGLE, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"),
        SINGLE,
        ("git lfs pull",),
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("good") / "model", hidden=64)


def broken(good: Path, target: Path, case: str) -> Path:
    shutil.copytree(good, target)
    CASES[case][0](target)
    return target


def check_line(line: str, path: Path, case: str) -> None:
    _, file, words = CASES[case]
    for word in (str(path), file, *words):
        assert word in line, (case, line)
    assert "Error" not in line, line  # of Python


@pytest.mark.parametrize("case", CASES)
def test_in_python(good, tmp_path, case):
    path = broken(good, tmp_path / "model", case)
    with pytest.raises(ModelError) as caught:
        LLM(str(path), max_num_seqs=2, max_model_len=32, max_num_batched_tokens=32)
    message = str(caught.value)
    assert "\n" not in message
    check_line(message, path, case)


def test_the_good_one_is_good(good):
    """Else the cases might fail for another reason."""
    from lmjax.models.registry import spec_from_hf
    from lmjax.weights.loader import load_params
    from lmjax.weights.source import resolve_model

    source = resolve_model(str(good))
    load_params(source, spec_from_hf(source.config, None), "float32")


def serve(path: Path) -> subprocess.CompletedProcess:
    flags = ["--model", str(path), "--host", "127.0.0.1", "--port", "0", "--log-level", "error"]
    flags += ["--max-num-seqs", "2", "--max-model-len", "32", "--max-num-batched-tokens", "32"]
    return subprocess.run(
        [sys.executable, "-m", "lmjax.cli", "serve", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


# one of each way that a fault takes: found in front, by the engine's process before and while it reads
QUICK = ("unknown model type", "tokenizer config is no JSON", "missing shard", "NaN")
SLOWLY = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", SLOWLY)
def test_serve(good, tmp_path, case):
    path = broken(good, tmp_path / "model", case)
    done = serve(path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("lmjax serve: error: ")
    check_line(done.stderr, path, case)
