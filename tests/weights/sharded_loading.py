"""Runs on 8 CPU devices: files to arrays on a mesh, against the same files on one device."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import jax
import numpy as np

from lmjax.models import decoder
from lmjax.models.params import layer_of, named_leaves, with_layer
from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.weights import streaming
from lmjax.weights.loader import Spread, load_params
from lmjax.weights.source import resolve_model
from tests.weights.checkpoints import LLAMA, tensors, write_gguf, write_hf
from tests.weights.test_shards import spread_by_hand


class Counter:
    """Bytes read of tensors, by all threads."""

    def __init__(self):
        self.total, self._lock, self._preadv = 0, threading.Lock(), os.preadv
        streaming.os.preadv = self.preadv

    def preadv(self, descriptor, buffers, at):
        with self._lock:
            self.total += sum(buffer.nbytes for buffer in buffers)
        return self._preadv(descriptor, buffers, at)


def load(path: Path, tp: int, load_format: str = "auto", dtype: str = "float32", stages: int = 1):
    source = resolve_model(str(path))
    spec = spec_from_hf(source.config, None)
    if tp * stages == 1:
        return load_params(source, spec, dtype, load_format), spec, spec
    wide = split.spread(spec, split.Degree(tp, stages))
    placement = Placement(make_mesh(jax.devices()[: tp * stages], stages))
    placed = placement.place(decoder.abstract_params(wide, dtype), placement.params(wide))
    return load_params(source, spec, dtype, load_format, spread=Spread(wide, placed)), spec, wide


def main() -> None:
    root = Path(tempfile.mkdtemp())
    config = LLAMA | {"vocab_size": 97}
    hf, file = write_hf(root / "hf", config, tensors(config)), write_gguf(root / "m.gguf", config, tensors(config))
    counter = Counter()
    for path, tp, load_format, dtype in (
        (hf, 2, "auto", "float32"),
        (hf, 4, "auto", "bfloat16"),
        (hf, 4, "dummy", "float32"),
        (file, 2, "auto", "float32"),
        (file, 4, "auto", "float32"),
    ):
        alone, _, _ = load(path, 1, load_format, dtype)
        counter.total = 0
        found, spec, wide = load(path, tp, load_format, dtype)
        if path is hf and load_format == "auto":
            stored = sum(t.nbytes for t in tensors(config).values())
            assert counter.total == stored, (counter.total, stored)
        for (name, want), got in zip(named_leaves(alone).items(), named_leaves(found).values(), strict=True):
            assert len(got.devices()) == tp
            np.testing.assert_array_equal(got, spread_by_hand(name, np.asarray(want), spec, wide), err_msg=name)
        print(f"{path.name} {load_format} {dtype} tp {tp} equal", flush=True)
    stages(root, counter)


def stages(root: Path, counter: Counter) -> None:
    """Three layers in two stages: the fourth place is filled with zeros, and each byte is still read once."""
    config = LLAMA | {"num_hidden_layers": 3}
    path = write_hf(root / "three", config, tensors(config))
    alone, _, _ = load(path, 1)
    counter.total = 0
    found, spec, wide = load(path, 2, stages=2)
    assert counter.total == sum(t.nbytes for t in tensors(config).values())
    assert (wide.stages, len(wide.layers)) == (2, 2)
    have = named_leaves(alone)
    for name, got in named_leaves(found).items():
        got, layer = np.asarray(got), layer_of(name)
        if layer is None:
            wanted = np.asarray(have[name])
            np.testing.assert_array_equal(got[: len(wanted)], wanted, err_msg=name)
            assert not got[len(wanted) :].any()
            continue
        for stage in range(2):
            own = stage * 2 + layer
            if own < 3:
                wanted = spread_by_hand(name, np.asarray(have[with_layer(name, own)]), spec, wide)
                np.testing.assert_array_equal(got[stage], wanted, err_msg=name)
            else:
                assert not got[stage].any()
    print("two stages equal", flush=True)


if __name__ == "__main__":
    main()
