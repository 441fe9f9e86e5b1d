"""Runs on 8 CPU devices: packed experts from files on a mesh. Cases: ``family/kind:tp:how``, how being ``tp``, or
``ep`` for whole experts a device; ``+`` after it: a forward, too. Prints the worst error of the logits."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from lmjax.config import EngineConfig
from lmjax.models.params import named_leaves
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.runtime.live import read_weights
from lmjax.runtime.resolve import resolve
from lmjax.weights.packing import packings
from lmjax.weights.source import resolve_model
from pallas_kernels.platform import CPU
from tests import tiny
from tests.models.driver import Driver
from tests.parallel.sharded_forward import ShardedDriver, work
from tests.weights.test_quantised_experts import config_of, write
from tests.weights.test_quantised_families import write_mxfp4

LARGER = {
    "mixtral": {"num_key_value_heads": 2},
    "gpt_oss": {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32},
}


def worst_error(family: str, kind: str, tp: int, expert_parallel: bool, forward: bool) -> float:
    folder, config = Path(tempfile.mkdtemp()), config_of(family, **LARGER[family])
    if kind == "mxfp4":
        path = write_mxfp4(folder, config)[1]
    else:
        path = write(folder / "plain", config, tiny.tensors(family, config))
    settings = {"quantization": None if kind == "mxfp4" else kind, "quantized_weights": "packed", "dtype": "float32"}
    config = EngineConfig(model=str(path), **settings).validate()
    source, placement = resolve_model(config.model), Placement(make_mesh(jax.devices()[:tp]), expert_parallel)
    one, many = resolve(config, source, "cpu"), resolve(config, source, "cpu", placement.env(CPU), placement)
    assert packings(one.spec) == packings(many.spec) and len(packings(one.spec)) == (2 if kind == "mxfp4" else 4)
    alone, together = (read_weights(resolved, source, "auto") for resolved in (one, many))
    found, count = named_leaves(together), 0
    for name, want in named_leaves(alone).items():
        if ".experts." in name:
            held = found[name].addressable_shards[0].data.size
            assert held == want.size // tp or (name.endswith((".scale", ".bias")) and ".down." in name), name
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(want), err_msg=name)
            count += 1
    assert count >= 4
    if not forward:
        return 0.0
    drivers, worst = (Driver(alone, one.spec), ShardedDriver(together, many.spec, placement)), 0.0
    for step in work(tp):
        wanted, got = (driver.step(step) for driver in drivers)
        for key, logits in wanted.items():
            error = np.abs(got[key][:, : one.spec.vocab] - logits).max() / np.abs(logits).max()
            worst = max(worst, float(error))
    return worst


if __name__ == "__main__":
    for case in sys.argv[1:]:
        model, tp, how = case.split(":")
        error = worst_error(*model.split("/"), int(tp), how.startswith("ep"), how.endswith("+"))
        print(f"{case} {error:.3g}", flush=True)
