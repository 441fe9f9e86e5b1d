"""Every way a .safetensors checkpoint is damaged gives one line that names the file and the cause."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmjax.weights.errors import WeightError
from lmjax.weights.safetensors import read_directory, read_header, read_tensor
from tests.weights.checkpoints import LLAMA, tensors, write_hf


@pytest.fixture
def shards(tmp_path):
    return write_hf(tmp_path, LLAMA, tensors(LLAMA), shards=2)


def fails(directory, *words):
    with pytest.raises(WeightError) as caught:
        read_directory(directory)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "uint8", "bool"])
def test_reads_what_the_package_reads(tmp_path, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    arrays = {"a": np.arange(12).reshape(3, 4).astype(kind), "b": np.ones((), kind), "empty": np.ones((0, 3), kind)}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"x": "y"})
    infos = read_header(tmp_path / "model.safetensors")
    oracle = load_file(tmp_path / "model.safetensors")
    assert set(infos) == set(oracle)
    for name, want in oracle.items():
        got = read_tensor(infos[name])
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_array_equal(got, want)


def test_shards_give_every_tensor(shards):
    weights = tensors(LLAMA)
    infos = read_directory(shards)
    assert set(infos) == set(weights)
    for name, want in weights.items():
        np.testing.assert_array_equal(read_tensor(infos[name]), want)


def test_stray_older_file_beside_the_shards_is_not_read(shards):
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, shards / "model.safetensors")
    np.testing.assert_array_equal(
        read_tensor(read_directory(shards)["model.norm.weight"]), tensors(LLAMA)["model.norm.weight"]
    )


def test_missing_shard(shards):
    (shards / SECOND).unlink()
    fails(shards, SECOND, "is missing")


def test_empty_file(shards):
    (shards / FIRST).write_bytes(b"")
    fails(shards, FIRST, "0 bytes")


@pytest.mark.parametrize("cut", [1, 1024])
def test_cut_file(shards, cut):
    path = shards / SECOND
    path.write_bytes(path.read_bytes()[:-cut])
    fails(shards, SECOND, "cut")


def test_appended_bytes(shards):
    with open(shards / SECOND, "ab") as f:
        f.write(b"x")
    fails(shards, SECOND, "more than its header says")


def test_file_cut_within_the_header(shards):
    path = shards / FIRST
    path.write_bytes(path.read_bytes()[:100])
    fails(shards, FIRST, "header length")
    path.write_bytes(path.read_bytes()[:5])
    fails(shards, FIRST, "5 bytes")


def test_header_length_of_an_exabyte(shards):
    path = shards / FIRST
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])
    fails(shards, FIRST, str(2**60))


def test_flipped_header_bytes_never_pass_as_other_data(shards):
    """Any one flipped byte of the header: an error, or (a changed name or metadata) the true bytes under that name."""
    path = shards / FIRST
    good = path.read_bytes()
    expected = sorted((i.offset, i.size, i.stored, i.shape) for i in read_header(path).values())
    rng = np.random.default_rng(0)
    length = struct.unpack("<Q", good[:8])[0]
    errors = 0
    for at in rng.choice(8 + length, 300, replace=False):
        bad = bytearray(good)
        bad[at] ^= 0xFF
        path.write_bytes(bad)
        try:
            found = read_header(path)
        except WeightError as error:
            errors += 1
            assert FIRST in str(error) and "\n" not in str(error)
        else:
            assert sorted((i.offset, i.size, i.stored, i.shape) for i in found.values()) == expected
    assert errors > 200


def test_lfs_pointer(shards):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"
    (shards / FIRST).write_text(pointer)
    fails(shards, FIRST, "git-LFS pointer", "git lfs pull")
    (shards / "model.safetensors.index.json").write_text(pointer)
    fails(shards, "index.json", "git-LFS pointer")


def test_index_names_a_tensor_that_its_shard_lacks(shards):
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = FIRST
    index.write_text(json.dumps(content))
    fails(shards, FIRST, "model.norm.weight")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\x00"])
def test_damaged_index(shards, content):
    (shards / "model.safetensors.index.json").write_text(content)
    fails(shards, "index.json")


def test_index_cannot_point_outside_the_directory(shards):
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    fails(shards, "index.json", "../other.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
        [1],
        None,
    ],
)
def test_wrong_header_entry(tmp_path, entry):
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    fails(tmp_path, "model.safetensors", "w")


def test_shards_without_an_index(shards):
    (shards / "model.safetensors.index.json").unlink()
    fails(shards, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_only_pickles(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    fails(tmp_path, name, ".safetensors")


def test_nothing_there(tmp_path):
    fails(tmp_path, "no weights")
    (tmp_path / "m.gguf").write_bytes(b"x")
    fails(tmp_path, "m.gguf", "path")
