"""The GGUF reader against the ``gguf`` package's own reader and dequantisation."""

from __future__ import annotations

import math
import struct

import gguf
import numpy as np
import pytest

from lmjax.weights import gguf as ours
from lmjax.weights.errors import WeightError
from lmjax.weights.gguf import dequantisable, read_gguf, read_tensor
from tests.weights.checkpoints import LLAMA, tensors, write_gguf

KINDS = [kind for kind in dequantisable() if kind not in ("F32", "F16")]


def can_quantise(kind):
    try:
        gguf.quantize(np.zeros((1, 256), np.float32), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def random_blocks(kind, rows, blocks, seed=0):
    """Bytes of a quantised matrix. Scales are float16 somewhere in a block, so bytes whose float16 has the largest
    exponents (infinity, not a number) are kept out."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return np.random.default_rng(seed).integers(0, 0x50, (rows, blocks * block_bytes)).astype(np.uint8)


def write(path, entries, **metadata):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_float32(key, value)
    for name, (data, kind) in entries.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", *KINDS])
def test_every_type_equals_the_package(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(ours, "CHUNK", 2048)  # several chunks, the last one short
    code = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(1).standard_normal((37, 512)).astype(np.float32)
    if can_quantise(kind):
        data = gguf.quantize(values, code)
    else:
        data = random_blocks(kind, 37, 512 // gguf.GGML_QUANT_SIZES[code][0])
    path = write(tmp_path / "m.gguf", {"first": (np.ones(3, np.float32), "F32"), "w": (data, kind)})
    info = read_gguf(path).tensors["w"]
    assert info.stored == kind and info.shape == (37, 512)
    got, want = read_tensor(info), gguf.dequantize(data, code)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    if can_quantise(kind):
        assert 0 <= np.abs(got - values).max() < 3.0  # and it is the matrix that went in
        assert np.corrcoef(got.ravel(), values.ravel())[0, 1] > 0.65  # ternary types keep the least


def test_metadata_equals_the_package(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        LLAMA,
        tensors(LLAMA),
        extra={
            "a.strings": ["x", "ü", ""],
            "a.ints": [1, -2],
            "a.floats": [0.5, 1e-5],
            "a.f": 1e-5,
            "a.s": "two\nlines",
        },
    )
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            want = field.contents()
            assert file.metadata[key] == (
                want if isinstance(want, str | bool) or "strings" in key else pytest.approx(want)
            )
    assert file.metadata["a.f"] == 1e-5  # the shortest number with that float32
    assert {t.name: tuple(t.shape[::-1]) for t in reader.tensors} == {n: i.shape for n, i in file.tensors.items()}
    assert {t.name: t.data_offset for t in reader.tensors} == {n: i.offset for n, i in file.tensors.items()}


def fails(path, *words):
    with pytest.raises(WeightError) as caught:
        read_gguf(path)
    for word in (str(path), *words):
        assert word in str(caught.value), str(caught.value)


@pytest.fixture
def good(tmp_path):
    return write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA))


def test_empty(good):
    good.write_bytes(b"")
    fails(good, "0 bytes")


def test_wrong_magic(good):
    good.write_bytes(b"GGML" + good.read_bytes()[4:])
    fails(good, "GGML", "not a GGUF file")


def test_lfs_pointer(good):
    good.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    fails(good, "git-LFS")


@pytest.mark.parametrize("version,word", [(1, "version 1"), (99, "version 99"), (3 << 24, "big-endian")])
def test_wrong_version(good, version, word):
    data = good.read_bytes()
    good.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    fails(good, word)


def test_cut_anywhere(good):
    data = good.read_bytes()
    header = read_gguf(good).tensors
    start = min(info.offset for info in header.values())
    for size in [3, 7, 20, *range(24, start, 97), start + 1, len(data) - 1024]:
        good.write_bytes(data[:size])
        fails(good)


def test_damaged_header_gives_no_other_exception(good):
    data = good.read_bytes()
    start = min(info.offset for info in read_gguf(good).tensors.values())
    rng = np.random.default_rng(0)
    errors = 0
    for at in rng.choice(start, 400, replace=False):
        bad = bytearray(data)
        bad[at] ^= int(rng.integers(1, 256))
        good.write_bytes(bad)
        try:
            read_gguf(good)
        except WeightError as error:
            errors += 1
            assert str(good) in str(error) and "\n" not in str(error)
    assert errors > 50


def test_counts_of_an_exabyte(good):
    data = good.read_bytes()
    good.write_bytes(data[:8] + struct.pack("<QQ", 2**60, 2**60) + data[24:])
    fails(good, "damaged")


def test_part_of_a_split_file(tmp_path):
    fails(write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), extra={"split.count": 3}), "3 parts")


def test_integer_tensor_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf", {"w": (np.zeros((2, 32), np.int32), "I32")})
    with pytest.raises(WeightError, match=r"m\.gguf: tensor w: type I32 is not supported; known: .*Q4_K"):
        read_tensor(read_gguf(path).tensors["w"])


def test_scalars_and_vectors(tmp_path):
    half = np.arange(32, dtype=np.float16)
    path = write(
        tmp_path / "m.gguf",
        {"v": (half, "F16"), "q": (gguf.quantize(np.ones(32), gguf.GGMLQuantizationType.Q8_0), "Q8_0")},
    )
    file = read_gguf(path)
    np.testing.assert_array_equal(read_tensor(file.tensors["v"]), half.astype(np.float32))
    assert math.isclose(float(read_tensor(file.tensors["q"]).mean()), 1.0, rel_tol=1e-3)
