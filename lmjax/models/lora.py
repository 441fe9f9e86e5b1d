"""The LoRA adapters of a decoder: a tree beside its parameters, with room for several in each layer's matrices.

Any of them leaves out what it does not change: zeros there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lmjax.models.params import AttentionParams, LayerParams, MlpParams, ParamSpec
from lmjax.models.spec import DecoderSpec, LayerSpec, MlpSpec
from lmjax.nn.lora import Lora


@struct.dataclass
class LayerAdapters:
    qkv: Lora  # q, k, v: b [K, G, H, R], [K, 1, H, R] twice
    o: Lora  # b [D, R]
    gate_up: Lora | None = None  # gate, up, or up alone: b [1, F, R] each; None: the layer has experts
    down: Lora | None = None  # b [D, R]


def adapter_specs(spec: DecoderSpec, slots: int, rank: int) -> tuple[LayerAdapters, ...]:
    """One a layer, with a ``ParamSpec`` at every leaf. ``slots``: 1 for the tree of one adapter alone."""
    return tuple(_layer(layer, spec.hidden, slots * rank, rank) for layer in spec.layers)


def _layer(layer: LayerSpec, d: int, rows: int, rank: int) -> LayerAdapters:
    a, m = layer.attention, layer.mlp

    def b(out: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
        return ParamSpec((*out, rows), (*axes, None), "zeros")

    def lora(parts: tuple[ParamSpec, ...], fan_in: int, in_axis: str, axis: int = 0) -> Lora:
        return Lora(ParamSpec((len(parts), rows, fan_in), (None, None, in_axis), "zeros"), parts, rank=rank, axis=axis)

    q, kv = (b((a.kv_heads, n, a.head_dim), ("kv_heads", None, None)) for n in (a.heads // a.kv_heads, 1))
    whole = (b((d,), ("embed",)),)
    qkv, o = lora((q, kv, kv), d, "embed", axis=1), lora(whole, a.heads * a.head_dim, "heads")
    if not isinstance(m, MlpSpec):
        return LayerAdapters(qkv, o)
    parts = (b((1, m.ffn), (None, "ffn")),) * (2 if m.gated else 1)
    return LayerAdapters(qkv, o, lora(parts, d, "embed"), lora(whole, m.ffn, "ffn"))


def abstract_adapters(spec: DecoderSpec, dtype: str, slots: int, rank: int) -> tuple[LayerAdapters, ...]:
    """The tree with a ``jax.ShapeDtypeStruct`` at every leaf."""
    kind = jnp.dtype(dtype)
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, kind), adapter_specs(spec, slots, rank))


def put_adapter(every: Any, one: Any, slot: jax.Array) -> Any:
    """The tree of all slots with ``one`` adapter's in ``slot`` (int32 [])."""

    def put(all_of: Lora, own: Lora) -> Lora:
        at = slot * all_of.rank
        b = zip(all_of.b, own.b, strict=True)
        return replace(
            all_of,
            a=lax.dynamic_update_slice_in_dim(all_of.a, own.a, at, axis=1),
            b=tuple(lax.dynamic_update_slice_in_dim(x, y, at, axis=x.ndim - 1) for x, y in b),
        )

    return jax.tree.map(put, every, one, is_leaf=lambda x: isinstance(x, Lora))


def with_adapters(layers: tuple[LayerParams, ...], adapters: tuple[LayerAdapters, ...]) -> tuple[LayerParams, ...]:
    """The layers' parameters, their matrices with adapters."""
    return tuple(_with(layer, own) for layer, own in zip(layers, adapters, strict=True))


def _with(layer: LayerParams, own: LayerAdapters) -> LayerParams:
    attn, mlp = layer.attn, layer.mlp
    assert isinstance(attn, AttentionParams)  # latent attention is refused before
    attn = replace(attn, qkv=replace(attn.qkv, lora=own.qkv), o=replace(attn.o, lora=own.o))
    if isinstance(mlp, MlpParams):
        mlp = replace(mlp, gate_up=replace(mlp.gate_up, lora=own.gate_up), down=replace(mlp.down, lora=own.down))
    return LayerParams(attn, mlp)


def for_tokens(layer: LayerParams, slots: jax.Array) -> LayerParams:
    """A layer with adapters for a step whose tokens have these ``slots`` (int32 [T])."""
    return jax.tree.map(
        lambda x: replace(x, slots=slots) if isinstance(x, Lora) else x, layer, is_leaf=lambda x: isinstance(x, Lora)
    )
