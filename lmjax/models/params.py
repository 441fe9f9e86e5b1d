"""The parameter tree of a decoder, and what is known of each parameter without its values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from lmjax.models.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, MoeSpec, NormSpec
from lmjax.nn.norm import LayerNorm
from lmjax.nn.packing import Packing
from lmjax.nn.weight import Dense, Quantized

# Norms: an array, that of an RMSNorm, or a ``LayerNorm``; None where the layer has none at that place.


@struct.dataclass
class AttentionParams:
    norm: Any  # [D]
    # One matrix, by KV head: its G = N / K query heads, then its key head, then its value head. So the KV-head axis
    # can be sharded and every shard holds whole heads.
    qkv: Dense  # [K, G + 2, H, D]
    o: Dense  # [D, N * H]
    q_norm: Any = None  # [H]; [K, G, H] where heads have their own
    k_norm: Any = None  # [H]; [K, H]
    sinks: Any = None  # [N]
    post_norm: Any = None  # [D]


@struct.dataclass
class LatentParams:
    """Of attention over latent vectors (``models.latent``): C + R features a token, Q + R of a query, V of a value."""

    norm: Any  # [D]
    q_up: Dense  # [N, Q + R, rank of q_down, or D]
    kv_down: Dense  # [C + R, D]
    kv_norm: Any  # [C]
    kv_up: Any  # [N, Q + V, C]  of each head: what makes its keys, its values
    o: Dense  # [D, N * V]
    q_down: Dense | None = None  # [rank, D]
    q_norm: Any = None  # [rank]
    post_norm: Any = None  # [D]


@struct.dataclass
class MlpParams:
    norm: Any  # [D]
    gate_up: Dense  # [2, F, D]; without a gate [1, F, D]
    down: Dense  # [D, F]
    post_norm: Any = None  # [D]


@struct.dataclass
class ExpertParams:
    gate_up: Dense  # [E, 2, F, D]
    down: Dense  # [E, D, F]


@struct.dataclass
class SharedExpertParams:
    gate: Any  # [1, D], or None
    gate_up: Dense  # [2, F, D]
    down: Dense  # [D, F]


@struct.dataclass
class MoeParams:
    norm: Any  # [D]
    router: Any  # [E, D]
    experts: ExpertParams
    shared: SharedExpertParams | None = None
    router_bias: Any = None  # [E]
    choice_bias: Any = None  # float32 [E]
    post_norm: Any = None  # [D]


@struct.dataclass
class LayerParams:
    attn: AttentionParams | LatentParams
    mlp: MlpParams | MoeParams


@struct.dataclass
class DecoderParams:
    embed: Any  # [V, D]
    layers: tuple[LayerParams, ...]
    norm: Any  # [D]
    head: Any = None  # [V, D]; None: tied to embed
    head_bias: Any = None  # [V]
    positions: Any = None  # [rows, D]  of a learned table
    embed_norm: Any = None  # [D]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: shape, the logical name of each axis (for sharding), how dummy values are made."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: str | None = None  # None: the model's

    @property
    def fan_in(self) -> int:
        return self.shape[-1]


def param_specs(spec: DecoderSpec) -> DecoderParams:
    """The tree with a ``ParamSpec`` at every leaf. With pipeline stages a layer's leaves are those of the layers at its
    place in all stages: [stages, ...]."""
    d, v = spec.hidden, spec.num_vocab_rows
    layers = tuple(
        _packed(LayerParams(attn=_attention(layer, d), mlp=_mlp(layer, d)), layer.packing) for layer in spec.layers
    )
    return DecoderParams(
        embed=ParamSpec((v, d), ("vocab", "embed")),
        layers=layers if spec.stages == 1 else jax.tree.map(partial(_of_all_stages, spec.stages), layers),
        norm=_norm(spec.norm, d),
        head=None if spec.tie_embeddings else ParamSpec((v, d), ("vocab", "embed")),
        head_bias=ParamSpec((v,), ("vocab",), "zeros") if spec.head_bias else None,
        positions=None if spec.positions is None else ParamSpec((spec.positions, d), (None, "embed")),
        embed_norm=None if spec.embed_norm is None else _norm(spec.embed_norm, d),
    )


def _of_all_stages(stages: int, p: ParamSpec) -> ParamSpec:
    return replace(p, shape=(stages, *p.shape), axes=("stages", *p.axes))


def _packed(layer: LayerParams, packing: tuple[tuple[str, Packing], ...]) -> LayerParams:
    kept = dict(packing)
    return map_named(lambda name, p: _quantized(p, kept[name]) if name in kept else p, layer)


def _quantized(p: ParamSpec, packing: Packing) -> Quantized:
    """Of a matrix [*out, in], or experts'."""
    out, columns, axes = p.shape[:-1], p.shape[-1], p.axes[:-1]
    at = packing.input_axis(len(p.shape), experts="experts" in axes)

    def with_input(size: int, dtype: str) -> ParamSpec:
        return ParamSpec((*out[:at], size, *out[at:]), (*axes[:at], p.axes[-1], *axes[at:]), dtype=dtype)

    scale = ParamSpec(out, axes, dtype=packing.scale_dtype)
    if packing.group:
        scale = with_input(columns // packing.group, packing.scale_dtype)
    values = with_input(columns // packing.per_byte, packing.values_dtype)
    return Quantized(values, scale, scale if packing.zero else None, packing)  # type: ignore[arg-type]


def _norm(norm: NormSpec, size: int) -> Any:
    one = ParamSpec((size,), ("embed",), "zeros" if norm.plus_one else "ones")
    if norm.kind == "rms":
        return one
    return LayerNorm(one, ParamSpec((size,), ("embed",), "zeros") if norm.bias else None)


def _attention(layer: LayerSpec, d: int) -> AttentionParams | LatentParams:
    a = layer.attention
    if a.latent is not None:
        return _latent(layer, a.latent, d)
    qkv = (a.kv_heads, a.heads // a.kv_heads + 2, a.head_dim)
    qkv_axes = ("kv_heads", None, None)
    q_norm, k_norm = _head_norms(a)
    return AttentionParams(
        norm=_norm(layer.norm, d) if layer.pre_norm else None,
        qkv=_dense(qkv, d, qkv_axes, "embed", a.qkv_bias),
        o=_dense((d,), a.heads * a.head_dim, ("embed",), "heads", a.o_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=ParamSpec((a.heads,), ("heads",)) if a.sinks else None,
        post_norm=_norm(layer.norm, d) if layer.post_norm else None,
    )


def _latent(layer: LayerSpec, m: LatentSpec, d: int) -> LatentParams:
    """Heads are spread over devices; what makes the latent vectors is on each of them, as the vectors are."""
    a = layer.attention

    def down(rank: int) -> Dense:
        return _dense((rank,), d, (None,), "embed", m.bias)

    return LatentParams(
        norm=_norm(layer.norm, d) if layer.pre_norm else None,
        q_down=None if m.q_rank is None else down(m.q_rank),
        q_norm=None if m.q_rank is None else ParamSpec((m.q_rank,), (None,), "ones"),
        q_up=_dense((a.heads, m.nope_dim + m.rope_dim), m.q_rank or d, ("heads", None), "embed", False),
        kv_down=down(m.rank + m.rope_dim),
        kv_norm=ParamSpec((m.rank,), (None,), "ones"),
        kv_up=ParamSpec((a.heads, m.nope_dim + m.value_dim, m.rank), ("heads", None, None)),
        o=_dense((d,), a.num_values, ("embed",), "heads", a.o_bias),
        post_norm=_norm(layer.norm, d) if layer.post_norm else None,
    )


def _head_norms(a: AttentionSpec) -> tuple[ParamSpec | None, ParamSpec | None]:
    if a.qk_norm is None:
        return None, None
    if a.qk_norm_over == "head":
        one = ParamSpec((a.head_dim,), (None,), "zeros" if a.qk_norm.plus_one else "ones")
        return one, one
    return (
        ParamSpec((a.kv_heads, a.heads // a.kv_heads, a.head_dim), ("kv_heads", None, None), "ones"),
        ParamSpec((a.kv_heads, a.head_dim), ("kv_heads", None), "ones"),
    )


def _mlp(layer: LayerSpec, d: int) -> MlpParams | MoeParams:
    m = layer.mlp
    norm = _norm(layer.norm, d) if layer.pre_norm and not layer.shared_norm else None
    post_norm = _norm(layer.norm, d) if layer.post_norm else None
    if isinstance(m, MoeSpec):
        return _moe(m, d, norm, post_norm)
    return MlpParams(
        norm=norm,
        gate_up=_dense((2 if m.gated else 1, m.ffn), d, (None, "ffn"), "embed", m.bias),
        down=_dense((d,), m.ffn, ("embed",), "ffn", m.bias),
        post_norm=post_norm,
    )


def _moe(m: MoeSpec, d: int, norm: Any, post_norm: Any) -> MoeParams:
    shared = None
    if m.shared_ffn is not None:
        shared = SharedExpertParams(
            gate=ParamSpec((1, d), (None, "embed")) if m.shared_gate else None,
            gate_up=_dense((2, m.shared_ffn), d, (None, "ffn"), "embed", False),
            down=_dense((d,), m.shared_ffn, ("embed",), "ffn", False),
        )
    return MoeParams(
        norm=norm,
        # every device routes all tokens, whichever experts it holds
        router=ParamSpec((m.experts, d), (None, "embed")),
        experts=ExpertParams(
            gate_up=_dense((m.experts, 2, m.ffn), d, ("experts", None, "expert_ffn"), "embed", m.bias),
            down=_dense((m.experts, d), m.ffn, ("experts", "embed"), "expert_ffn", m.bias),
        ),
        shared=shared,
        router_bias=ParamSpec((m.experts,), (None,), "zeros") if m.bias else None,
        # scores are told apart by less than bfloat16 has room for
        choice_bias=ParamSpec((m.experts,), (None,), "zeros", "float32") if m.routing.choice_bias else None,
        post_norm=post_norm,
    )


def _dense(out: tuple[int, ...], fan_in: int, out_axes: tuple[str | None, ...], in_axis: str, bias: bool) -> Dense:
    weight: Any = ParamSpec((*out, fan_in), (*out_axes, in_axis))
    return Dense(weight, ParamSpec(out, out_axes, "zeros") if bias else None)  # type: ignore[arg-type]


def abstract_params(spec: DecoderSpec, dtype: str) -> DecoderParams:
    """The tree with a ``jax.ShapeDtypeStruct`` at every leaf; dtype: ``float32``, ``bfloat16`` or ``float16``."""
    kind = jnp.dtype(dtype)
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype) if p.dtype else kind), param_specs(spec)
    )


def init_params(spec: DecoderSpec, dtype: str, seed: int = 0) -> DecoderParams:
    """Dummy weights as numpy-backed jax arrays: normal with deviation fan_in ** -0.5, norms 1, biases 0.

    Each parameter draws from (seed, its name), so a tensor does not depend on the others.
    """
    return map_named(lambda name, p: jnp.asarray(init_param(name, p, dtype, seed)), param_specs(spec))


def init_param(name: str, p: ParamSpec, dtype: str, seed: int) -> np.ndarray:
    """The dummy values of one parameter."""
    kind = jnp.dtype(p.dtype or dtype)
    if p.init != "normal":
        return np.full(p.shape, 1 if p.init == "ones" else 0, kind)
    rng = np.random.default_rng([seed, *name.encode()])
    values = rng.standard_normal(p.shape, dtype=np.float32)
    values *= np.float32(1 / math.sqrt(p.fan_in))
    return values.astype(kind)


def map_named(function: Any, tree: Any) -> Any:
    """``function(name, leaf)`` over a tree; names are dotted paths such as ``layers.0.attn.qkv.weight``."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(dotted(path), leaf), tree)


def named_leaves(tree: Any) -> dict[str, Any]:
    """{dotted name: leaf} of a tree, in the tree's order."""
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def dotted(path: tuple[Any, ...]) -> str:
    def part(key: Any) -> str:
        for field in ("name", "key", "idx"):
            if hasattr(key, field):
                return str(getattr(key, field))
        raise TypeError(f"unknown kind of tree key {key!r}")

    return ".".join(part(key) for key in path)


_LAYER = re.compile(r"layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer that a dotted name belongs to, None for embedding, head and last norm."""
    found = _LAYER.match(name)
    return int(found.group(1)) if found else None


def with_layer(name: str, layer: int) -> str:
    """The same parameter of another layer."""
    return _LAYER.sub(f"layers.{layer}.", name, count=1)
