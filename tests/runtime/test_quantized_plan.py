"""Quantised Llama-3.1-8B, Mixtral-8x7B and gpt-oss-20b as ``lmjax plan`` sees them, and their steps compiled for an
H200 that is not there."""

from __future__ import annotations

import json
import math
import re

import jax
import pytest

from lmjax.config import ConfigError
from lmjax.models.params import named_leaves, param_specs
from lmjax.parallel.split import Degree
from lmjax.runtime import hlo
from lmjax.runtime.buckets import ForwardKey
from lmjax.runtime.plan_costs import weights_of
from lmjax.runtime.programs import forward_program
from lmjax.weights.packing import packings
from tests import deviceless
from tests.runtime.test_plan import CONFIGS, deployment

LLAMA = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
KINDS = {"int8": (0.51, 0.57), "fp8": (0.51, 0.57), "int4": (0.29, 0.38)}


def bytes_of(spec, dtype="bfloat16"):
    """(of the layers' matrices, of everything)"""
    leaves = named_leaves(param_specs(spec))
    sizes = {n: math.prod(p.shape) * jax.numpy.dtype(p.dtype or dtype).itemsize for n, p in leaves.items()}
    return sum(size for n, size in sizes.items() if ".weight" in n), sum(sizes.values())


@deviceless.skip
@pytest.mark.parametrize("kind", KINDS)
def test_weight_bytes(kind):
    plain, packed = (
        deployment(CONFIGS / "llama-3.1-8b.json", max_model_len=8192, quantization=q).resolve() for q in (None, kind)
    )
    (matrices, whole), (few, all_of_it) = bytes_of(plain.spec), bytes_of(packed.spec)
    assert few <= KINDS[kind][0] * matrices and all_of_it <= KINDS[kind][1] * whole
    weights = weights_of(packed.spec, "bfloat16", Degree())
    assert weights.bytes == all_of_it and weights.total == weights_of(plain.spec, "bfloat16", Degree()).total


@deviceless.skip
@pytest.mark.parametrize(
    ("model", "kind", "most"),
    [("mixtral-8x7b", kind, most) for kind, most in (("int8", 0.51), ("fp8", 0.51), ("int4", 0.29))]
    + [("gpt-oss-20b", None, 0.27)],
)
def test_bytes_of_experts(model, kind, most):
    """Of the matrices, and of all weights as the published files have them: gpt-oss-20b 12.8 GiB of 39.0."""
    packed = deployment(CONFIGS / f"{model}.json", max_model_len=8192, quantization=kind).resolve()
    plain = deployment(CONFIGS / f"{model}.json", max_model_len=8192, quantized_weights="dequantized").resolve()

    def size(spec):
        leaves = named_leaves(param_specs(spec)).items()
        held = [p for name, p in leaves if ".experts." in name and not name.endswith(".bias")]
        return sum(math.prod(p.shape) * jax.numpy.dtype(p.dtype or "bfloat16").itemsize for p in held)

    assert size(packed.spec) <= most * size(plain.spec)
    counted, floats = (weights_of(r.spec, "bfloat16", Degree()) for r in (packed, plain))
    assert counted.bytes == bytes_of(packed.spec)[1] and counted.total == floats.total
    # a decode step of one token reads the experts of one token
    picked = (sum(n * share for _, n, share in w.experts) for w in (counted, floats))
    assert next(picked) <= (most + 0.01) * next(picked)
    if model == "gpt-oss-20b":
        assert counted.bytes == pytest.approx(13_761_264_768, rel=1e-3)  # the size of its files, as their index says


@deviceless.skip
@pytest.mark.parametrize("tokens", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_makes_a_weight_wide(kind, tokens, tmp_path):
    """Nothing of an optimized program has as many numbers as a matrix of a layer, but the packed matrix itself."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    resolved = deployment(tmp_path / "config.json", max_model_len=8192, quantization=kind).resolve()
    shapes = resolved.shapes(tuple(2000 for _ in resolved.kv_specs), 8192)
    program = forward_program(shapes, ForwardKey(tokens, min(tokens, 256)))
    done = deviceless.compile(program.function, *program.arguments, donate=program.donate)
    d, f, qkv = 4096, 14336, 6144
    weights = {d * qkv, d * d, 2 * d * f, d * f}
    sizes = {name: [math.prod(shape) for shape in found] for name, found in float_shapes(done.text).items()}
    wide = {name: size for name, size in sizes.items() if weights & set(size)}
    assert wide == {}
    assert done.memory.temp_size_in_bytes < 2 * d * d + (2 * f + 4 * d) * 4 * tokens


@deviceless.skip
def test_experts_that_offsets_do_not_reach(tmp_path):
    """Of 2 to 4 GiB a device: refused where they are asked for, else floats."""
    path = tmp_path / "config.json"
    config = json.loads((CONFIGS / "mixtral-8x7b.json").read_text()) | {"num_local_experts": 24, "num_hidden_layers": 2}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="got int8, but the experts of a layer take between 2 and 4 GiB a device"):
        deployment(path, max_model_len=8192, quantization="int8").resolve()
    assert len(packings(deployment(path, max_model_len=8192, quantization="int4").resolve().spec)) == 8
    config = json.loads((CONFIGS / "gpt-oss-20b.json").read_text()) | {"num_local_experts": 320}
    path.write_text(json.dumps(config))
    kept = packings(deployment(path, max_model_len=8192).resolve().spec)
    assert len(kept) == 24 and all(name.endswith("experts.down.weight") for name in kept)


EXPERTS = [("gpt-oss-20b", None, 64)]
MORE = [("mixtral-8x7b", kind, 64) for kind in KINDS] + [("gpt-oss-20b", None, 1024), ("mixtral-8x7b", "int4", 1024)]


@deviceless.skip
@pytest.mark.parametrize(
    ("model", "kind", "tokens"), [*EXPERTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_no_step_makes_experts_wide(model, kind, tokens, tmp_path):
    """Nor even one of them."""
    config = json.loads((CONFIGS / f"{model}.json").read_text()) | {"num_hidden_layers": 1}
    config |= {"layer_types": config["layer_types"][:1]} if "layer_types" in config else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolved = deployment(tmp_path / "config.json", max_model_len=8192, quantization=kind).resolve()
    shapes = resolved.shapes(tuple(2000 for _ in resolved.kv_specs), 8192)
    program = forward_program(shapes, ForwardKey(tokens, min(tokens, 256)))
    done = deviceless.compile(program.function, *program.arguments, donate=program.donate)
    d, f, (mlp,) = config["hidden_size"], config["intermediate_size"], {layer.mlp for layer in resolved.spec.layers}
    one = {d * f, 2 * d * f}
    sizes = {name: {math.prod(shape) for shape in found} for name, found in float_shapes(done.text).items()}
    wide = {n: s for n, s in sizes.items() if s & (one | {mlp.experts * size for size in one})}
    assert wide == {}
    calls = [line for line in done.text.splitlines() if "custom-call(" in line]
    assert sum(bool(re.search(rf"(u8|s8|f8e4m3fn)\[{mlp.experts},\d+,\d+,\d+\]", line)) for line in calls) == 2
    assert done.memory.temp_size_in_bytes < 2 * mlp.experts * d * f  # the floats of the smaller stack


def float_shapes(text):
    """{instruction of the entry computation: shapes of its float results}"""
    found = {}
    for i in hlo.entry(text):
        if i.opcode in ("parameter", "bitcast", "get-tuple-element", "tuple"):
            continue
        shapes = re.findall(r"\b(?:bf16|f16|f32)\[([\d,]+)\]", i.shape)
        found[i.name] = [tuple(map(int, shape.split(","))) for shape in shapes]
    return found
