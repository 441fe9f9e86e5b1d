"""Runs on 8 CPU devices: packed weights from files on a mesh give one device's logits. Cases: ``layout:tp:kv dtype``,
with ``int8``, ``fp8`` and ``int4`` for what is quantised while loading, of a tiny Llama or ``family/``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from lmjax.config import QUANTIZATIONS, EngineConfig
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.runtime.live import read_weights
from lmjax.runtime.resolve import resolve
from lmjax.weights.packing import packings
from lmjax.weights.source import resolve_model
from pallas_kernels.platform import CPU
from tests import tiny
from tests.models.driver import Driver
from tests.parallel.sharded_forward import ShardedDriver, work
from tests.weights import quantised


def worst_error(layout: str, tp: int, kv_dtype: str) -> float:
    family, _, kind = layout.rpartition("/")
    at_load, folder = kind if kind in QUANTIZATIONS else None, Path(tempfile.mkdtemp())
    if family:
        path = tiny.write(family, folder)
    else:
        path = quantised.write(folder, "fp8-static" if at_load else kind)[1 if at_load else 0]
    config = EngineConfig(model=str(path), quantization=at_load, quantized_weights="packed", dtype="float32").validate()
    source = resolve_model(config.model)
    placement = Placement(make_mesh(jax.devices()[:tp]))
    one = resolve(config, source, "cpu")
    many = resolve(config, source, "cpu", placement.env(CPU), placement)
    assert len(packings(one.spec)) == len(packings(many.spec)) == 4 * len(one.spec.layers)
    alone = Driver(read_weights(one, source, "auto"), one.spec, dtype=kv_dtype)
    together = ShardedDriver(read_weights(many, source, "auto"), many.spec, placement, dtype=kv_dtype)
    worst = 0.0
    for step in work(tp):
        wanted, found = alone.step(step), together.step(step)
        for key, logits in wanted.items():
            error = np.abs(found[key][:, : one.spec.vocab] - logits).max() / np.abs(logits).max()
            worst = max(worst, float(error))
    return worst


if __name__ == "__main__":
    for case in sys.argv[1:]:
        layout, tp, kv_dtype = case.split(":")
        print(f"{case} {worst_error(layout, int(tp), kv_dtype):.3g}", flush=True)
