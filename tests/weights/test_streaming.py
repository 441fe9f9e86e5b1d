"""The check of values, against numpy's own in float64, and streams into any layout, against assignment."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from lmjax.weights.streaming import PIECE, all_finite, fill, pour, runs

KINDS = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LARGEST = {"float64": 1.7e308, "float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 1000, PIECE + 3])
def test_one_bad_value_anywhere_is_found(kind, size):
    values = np.random.default_rng(0).standard_normal(size).astype(KINDS[kind])
    values[0], values[-1] = 0.0, -LARGEST[kind]
    assert np.isfinite(values.astype(np.float64)).all() and all_finite(values)
    for at in {0, size // 2, size - 1}:
        for bad in (np.nan, -np.nan, np.inf, -np.inf):
            broken = values.copy()
            broken[at] = bad
            assert not all_finite(broken), (at, bad)


def test_all_bit_patterns_of_halves():
    for kind in ("float16", "bfloat16"):
        values = np.arange(1 << 16, dtype=np.uint16).view(KINDS[kind])
        with np.errstate(invalid="ignore"):
            wanted = np.isfinite(values.astype(np.float64))
        assert [all_finite(values[i : i + 1]) for i in range(1 << 16)] == wanted.tolist()


def test_nothing_and_numbers_of_other_kinds():
    assert all_finite(np.empty(0, np.float32)) and all_finite(np.full(3, 255, np.uint8))
    assert all_finite(np.full((), 1.0, np.float16)) and not all_finite(np.full((), np.nan, np.float16))


LAYOUTS = {
    "whole": lambda a: a,
    "rows": lambda a: a[:, 1],
    "columns": lambda a: a[:, :, 2],
    "halves": lambda a: a.reshape(3, 4, 2, 4).swapaxes(2, 3),
    "one": lambda a: a[1, 2, 3, ...],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_streams_into_any_layout(layout, kind, monkeypatch):
    monkeypatch.setattr("lmjax.weights.streaming.PIECE", 20)  # several pieces a run, none of which divides it
    stored = np.random.default_rng(1).standard_normal(3 * 4 * 8).astype(KINDS[kind])
    for how in ("fill", "pour"):
        whole, wanted = np.zeros((3, 4, 8), np.float32), np.zeros((3, 4, 8), np.float32)
        place, expected = LAYOUTS[layout](whole), LAYOUTS[layout](wanted)
        values = stored[: place.size]
        expected[...] = values.reshape(place.shape)

        def read(at, raw, values=values):
            raw[:] = values.view(np.uint8)[at * values.itemsize :][: len(raw)]

        if how == "fill":
            assert fill(place, values.dtype, read)
        else:
            pour(place, np.array_split(values, 5))
        np.testing.assert_array_equal(whole, wanted)
        assert sum(run.size for run in runs(place)) == place.size


def test_a_bad_value_ends_the_stream():
    stored = np.array([1.0, np.inf, 3.0], np.float32)

    def read(at, raw):
        raw[:] = stored.view(np.uint8)[at * 4 :][: len(raw)]

    assert not fill(np.empty(3, np.float16), stored.dtype, read)  # and not a value too large for float16
