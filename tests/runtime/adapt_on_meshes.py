"""Runs on 8 CPU devices: weights of a caller, on a mesh of its own or none, for engines on meshes."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from lmjax import LLM, SamplingParams
from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.runtime.adapt import Adapter
from lmjax.runtime.compiler import CompileMonitor
from lmjax.weights.export import save_pretrained
from lmjax.weights.loader import Spread, load_params
from lmjax.weights.pytree import from_hf
from lmjax.weights.source import resolve_model
from tests import tiny
from tests.runtime.test_adapt import pointers

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "max_model_len": 32, "num_gpu_blocks_override": 4}


def one(name: str, degree: split.Degree, kind: AxisType = AxisType.Auto) -> None:
    """A family's checkpoint spread over a mesh: as loaded from its files there. kind: of the caller's mesh."""
    config = tiny.CASES[name].config
    path = tiny.write(name, tempfile.mkdtemp())
    spec, tensors = spec_from_hf(config, None), tiny.tensors(name)
    wide = split.spread(spec, degree)
    devices = jax.devices()[2 : 2 + degree.devices]
    placement = Placement(make_mesh(devices, degree.pp), degree.expert_parallel)
    placed = placement.place(decoder.abstract_params(wide, "float32"), placement.params(wide))
    loaded = load_params(resolve_model(str(path)), spec, "float32", spread=Spread(wide, placed))
    adapter = Adapter(spec, wide, placed, devices[0])
    with CompileMonitor(require_warm=True).watch():
        same = adapter.adapt(loaded)
    assert same.converted == 0 and pointers(same.params) == pointers(loaded)

    def check(tree):
        found = adapter.adapt(tree)
        jax.tree.map(np.testing.assert_array_equal, found.params, loaded)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, found.params, loaded))

    check(from_hf(tensors, spec))  # of one device
    for kind in (AxisType.Auto, AxisType.Explicit):
        # a trainer's mesh over the same devices, matrices in equal parts of any axis that can be cut
        mesh = Mesh(np.array(devices).reshape(1, -1), ("data", "model"), axis_types=(kind,) * 2)
        check({key: jax.device_put(x, cut(mesh, x.shape)) for key, x in tensors.items()})
        with jax.set_mesh(mesh):
            check({key: jax.device_put(x, cut(mesh, x.shape)) for key, x in tensors.items()})
    # and of devices in another order
    check(
        {key: jax.device_put(x, cut(Mesh(np.array(devices[::-1]), ("model",)), x.shape)) for key, x in tensors.items()}
    )
    out = Path(tempfile.mkdtemp())
    save_pretrained(loaded, config, out)
    written = load_file(out / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[key].tobytes() == x.tobytes() for key, x in tensors.items())
    print(f"{name} {degree} equal", flush=True)


def cut(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    axis = next((i for i, n in enumerate(shape) if n % mesh.shape["model"] == 0), None)
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "model"))


def explicit_is_not_copied() -> None:
    """Arrays with the mesh's axes in their type: an engine's program would not take them, but their buffers it does."""
    spec = spec_from_hf(tiny.CASES["llama_mha_bias"].config, None)
    wide = split.spread(spec, split.Degree(2))
    placement = Placement(make_mesh(jax.devices()[:2]))
    placed = placement.place(decoder.abstract_params(wide, "float32"), placement.params(wide))
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(AxisType.Explicit,))

    def put(x, leaf):
        axes = [None if axis is None else "model" for axis in leaf.sharding.spec]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    params = jax.tree.map(put, jax.device_get(from_hf(tiny.tensors("llama_mha_bias"), spec, wide)), placed)
    found = Adapter(spec, wide, placed, jax.devices()[0]).adapt(params)
    assert found.converted == 0 and pointers(found.params) == pointers(params)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, found.params, placed))
    print("explicit equal", flush=True)


def engines(wanted: list[str]) -> None:
    """On a part of the caller's mesh, whose axes the sizes name; and on one device that is not the first."""
    name = "llama_mha_bias"
    config, tensors = tiny.CASES[name].config, tiny.tensors(name)
    make = partial(LLM, params=tensors, config=config, **SMALL)
    grid = np.array(jax.devices()).reshape(2, 2, 2)
    cases = {
        "none": {},
        "replica": {"mesh": Mesh(grid[0, 0:1], ("data", "model")), "tensor_parallel_size": "model"},
        "stages": {"mesh": Mesh(grid[1, 0], ("stage",)), "pipeline_parallel_size": "stage"},
        "device": {"mesh": Mesh(grid[1, 1, 1:], ("x",))},
    }
    answers = {}
    for case, settings in ((case, cases[case]) for case in ("none", *wanted)):
        with make(**settings) as llm:
            answers[case] = llm.generate([[5, 6, 7], [9]], GREEDY, use_tqdm=False)
            params = llm._engine.executor.params
            if "mesh" in settings:
                assert params.norm.sharding.device_set == set(settings["mesh"].devices.flat)
            again = llm._engine.executor.adapt(params)
            assert again.converted == 0 and pointers(again.params) == pointers(params)
            assert llm._engine.executor.stats()["compiles_total"] == 0
            with jax.set_mesh(Mesh(grid.reshape(8), ("trainer",))):  # of more devices than the engine has
                llm.set_params(dict(tensors))
                answers[f"{case} in a mesh"] = llm.generate([[5, 6, 7], [9]], GREEDY, use_tqdm=False)
    tokens = {case: [out.outputs[0].token_ids for out in found] for case, found in answers.items()}
    assert all(found == tokens["none"] for found in tokens.values()), tokens
    print("engines equal", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "engines":
        engines(sys.argv[2:])
    else:
        one("llama_mha_bias", split.Degree(2))
        one("llama_gqa4_dim20", split.Degree(4))  # each KV head twice
        one("llama_gqa4_dim20", split.Degree(2, 2), AxisType.Explicit)
        one("qwen3_moe", split.Degree(1, 2))
        explicit_is_not_copied()
