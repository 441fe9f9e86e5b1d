"""Runs on 8 CPU devices, in a process of its own: a device's work in a tick over that of the whole forward."""

from __future__ import annotations

import sys
from typing import Any

import jax

from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.models.spec import DecoderSpec
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.runtime.buckets import ForwardKey
from lmjax.runtime.programs import Shapes, forward_program
from pallas_kernels.platform import CPU

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
}


def cost(spec: DecoderSpec, key: ForwardKey, placement: Placement | None) -> dict[str, float]:
    """XLA's count of one device's floating-point operations and bytes in the program for ``key``."""
    shapes = Shapes(
        spec=placement.spread(spec) if placement else spec,
        dtype="float32",
        kv_specs=decoder.kv_specs(placement.spread(spec) if placement else spec, "float32"),
        num_blocks=(2,),  # XLA counts the whole pool at each use, which would hide all else
        block_size=16,
        max_num_seqs=64,
        max_model_len=512,
        max_logprobs=5,
        placement=placement,
        most_tokens=key.num_tokens,
        **({"env": placement.env(CPU)} if placement else {}),
    )
    program = forward_program(shapes, key)
    done = jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments).compile()
    found: Any = done.cost_analysis()
    return {"flops": found["flops"], "bytes": found["bytes accessed"]}


def main(layers: int, stages: int, tp: int) -> None:
    spec = spec_from_hf(CONFIG | {"num_hidden_layers": layers}, None)
    placement = Placement(make_mesh(jax.devices()[: stages * tp], stages))
    key = ForwardKey(32, 8)
    whole = cost(spec, key, Placement(make_mesh(jax.devices()[:tp])) if tp > 1 else None)
    tick = cost(spec, key, placement)
    ratios = " ".join(f"{name} {tick[name] * stages / whole[name]:.3f}" for name in whole)
    print(f"{layers} layers, {stages} stages of {tp}: {ratios}", flush=True)


if __name__ == "__main__":
    for case in sys.argv[1:]:
        main(*map(int, case.split(":")))
