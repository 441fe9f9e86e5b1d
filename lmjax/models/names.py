"""Where each parameter comes from: tensor names of Hugging Face checkpoints and of llama.cpp's GGUF files.

A parameter may be made of several tensors (q, k and v; gate and up), and a tensor may hold several parts of one (a
fused q, k and v). Each ``TensorPart`` says which slice of the parameter it fills, so that a loader goes tensor by
tensor and never needs two of them in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lmjax.models.layout import Index, Layout, TensorPart, View
from lmjax.models.registry import family_layout
from lmjax.models.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, MoeSpec, NormSpec

__all__ = ["Index", "Names", "TensorPart", "by_tensor", "gguf_names", "harmless", "hf_names", "num_values"]

Parts = tuple[TensorPart, ...]
Names = dict[str, Parts]  # parameter (dotted path, see params.named_leaves) -> its tensors

_LLAMA = "model.layers.{i}."
# parameter's part -> name in the checkpoint, as most families have it; what a family has otherwise is in its
# ``LAYOUT``. There are also: "qkv" in place of q, k and v, one matrix: all of q, all of k, all of v; or "qkv_by_head":
# of each KV head its queries, its key, its value; "gate_up" in place of gate and up; "experts_gate_up" and
# "experts_down", of all experts; "positions", "embed_norm", "attn.post_norm", "mlp.post_norm". {h} in a QK-norm: a
# tensor a head.
_HF = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn.norm": _LLAMA + "input_layernorm",
    "q": _LLAMA + "self_attn.q_proj",
    "k": _LLAMA + "self_attn.k_proj",
    "v": _LLAMA + "self_attn.v_proj",
    "o": _LLAMA + "self_attn.o_proj",
    "q_norm": _LLAMA + "self_attn.q_norm",
    "k_norm": _LLAMA + "self_attn.k_norm",
    "sinks": _LLAMA + "self_attn.sinks",
    "q_down": _LLAMA + "self_attn.q_a_proj",
    "q_up": _LLAMA + "self_attn.q_b_proj",
    "kv_down": _LLAMA + "self_attn.kv_a_proj_with_mqa",
    "kv_up": _LLAMA + "self_attn.kv_b_proj",
    "q_latent_norm": _LLAMA + "self_attn.q_a_layernorm",
    "kv_latent_norm": _LLAMA + "self_attn.kv_a_layernorm",
    "mlp.norm": _LLAMA + "post_attention_layernorm",
    "gate": _LLAMA + "mlp.gate_proj",
    "up": _LLAMA + "mlp.up_proj",
    "down": _LLAMA + "mlp.down_proj",
    "router": _LLAMA + "mlp.gate",
    "choice_bias": _LLAMA + "mlp.gate.e_score_correction_bias",
    "expert_gate": _LLAMA + "mlp.experts.{e}.gate_proj",
    "expert_up": _LLAMA + "mlp.experts.{e}.up_proj",
    "expert_down": _LLAMA + "mlp.experts.{e}.down_proj",
    "shared_mix": _LLAMA + "mlp.shared_expert_gate",
    "shared_gate": _LLAMA + "mlp.shared_expert.gate_proj",
    "shared_up": _LLAMA + "mlp.shared_expert.up_proj",
    "shared_down": _LLAMA + "mlp.shared_expert.down_proj",
}
_GGUF = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn.norm": "blk.{i}.attn_norm",
    "attn.post_norm": "blk.{i}.post_attention_norm",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "o": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm",
    "mlp.norm": "blk.{i}.ffn_norm",
    "mlp.post_norm": "blk.{i}.post_ffw_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
}
GGUF_FAMILIES = {  # whether q and k are interleaved: the first two are llama.cpp's "llama" architecture
    "llama": True,
    "mistral": True,
    "qwen2": False,
    "qwen3": False,
    "gemma": False,
    "gemma2": False,
    "gemma3_text": False,
}
_TABLES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def hf_names(spec: DecoderSpec) -> Names:
    """Every parameter's tensors in a Hugging Face checkpoint."""
    layout = family_layout(spec)
    return dict(_names(spec, replace(layout, names=_HF | layout.names)))


def gguf_names(spec: DecoderSpec) -> Names:
    """Every parameter's tensors in a GGUF file; shapes as numpy sees them ([out, in], GGUF's own order reversed).

    ValueError for a family whose GGUF files are not read.
    """
    if any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        raise ValueError(f"{spec.model_type}: experts in a GGUF file are not supported")
    if spec.model_type not in GGUF_FAMILIES:
        raise ValueError(f"{spec.model_type}: GGUF files are read of {', '.join(GGUF_FAMILIES)} only")
    return dict(_names(spec, Layout(_GGUF, interleaved=GGUF_FAMILIES[spec.model_type])))


def by_tensor(names: Names) -> dict[str, tuple[str, Parts]]:
    """{tensor name: (parameter, the parts of it that the tensor holds)}."""
    found: dict[str, tuple[str, Parts]] = {}
    for parameter, parts in names.items():
        for part in parts:
            found[part.name] = parameter, (*found.get(part.name, ("", ()))[1], part)
    return found


def harmless(name: str, spec: DecoderSpec) -> bool:
    """Tensors that a checkpoint may hold and no parameter needs: recomputed tables, and the copy of a tied head."""
    layout = family_layout(spec)
    if name.endswith((*_TABLES, *layout.unused)) or (layout.extra_layer and name.startswith(layout.extra_layer)):
        return True
    heads = ((_HF | layout.names)["head"], _GGUF["head"])
    return spec.tie_embeddings and name.removesuffix(".weight") in heads and name.endswith(".weight")


def with_prefix(tensors: Mapping[str, Any], spec: DecoderSpec) -> dict[str, Any]:
    """Tensors by the names that ``hf_names`` has: some checkpoints leave out a prefix."""
    prefix = family_layout(spec).prefix
    wanted = {part.name for parts in hf_names(spec).values() for part in parts} if prefix else ()
    return {name if prefix + name not in wanted else prefix + name: x for name, x in tensors.items()}


def _names(spec: DecoderSpec, layout: Layout) -> Iterator[tuple[str, Parts]]:
    d, v = spec.hidden, spec.vocab
    table = layout.names
    yield "embed", (TensorPart(f"{table['embed']}.weight", (v, d)),)
    for i, layer in enumerate(spec.layers):
        names = {key: value.replace("{i}", str(i)) for key, value in table.items()}
        for parameter, parts in _layer(layer, spec, replace(layout, names=names)):
            yield f"layers.{i}.{parameter}", parts
    yield from _norm("norm", table, spec.norm, d)
    if not spec.tie_embeddings:
        yield "head", (TensorPart(f"{table['head']}.weight", (v, d)),)
    if spec.head_bias:
        yield "head_bias", (TensorPart(f"{table['head']}.bias", (v,)),)
    if spec.positions is not None:
        yield "positions", (TensorPart(f"{table['positions']}.weight", (spec.positions, d)),)
    if spec.embed_norm is not None:
        yield from _norm("embed_norm", table, spec.embed_norm, d)


def _norm(parameter: str, names: dict[str, str], norm: NormSpec, size: int) -> Iterator[tuple[str, Parts]]:
    weight = (TensorPart(f"{names[parameter]}.weight", (size,)),)
    if norm.kind == "rms":
        yield parameter, weight
        return
    yield f"{parameter}.weight", weight
    if norm.bias:
        yield f"{parameter}.bias", (TensorPart(f"{names[parameter]}.bias", (size,)),)


def _layer(layer: LayerSpec, spec: DecoderSpec, layout: Layout) -> Iterator[tuple[str, Parts]]:
    a, m, d, names = layer.attention, layer.mlp, spec.hidden, layout.names
    rotary = 0 if a.rope is None or a.latent else spec.ropes[a.rope].dim % a.head_dim  # 0: all of a head
    if layer.pre_norm:
        yield from _norm("attn.norm", names, layer.norm, d)
    if a.latent is not None:
        yield from _latent(a, a.latent, d, names)
    else:
        yield from _dense("attn.qkv", _qkv(a, layout, rotary), d, a.qkv_bias)
    yield from _dense("attn.o", (_matrix(names["o"], d, layout),), a.num_values, a.o_bias)
    yield from _head_norms(a, layout, rotary)
    if a.sinks:
        yield "attn.sinks", (TensorPart(names["sinks"], (a.heads,)),)
    if layer.post_norm:
        yield from _norm("attn.post_norm", names, layer.norm, d)
    if layer.pre_norm and not layer.shared_norm:
        yield from _norm("mlp.norm", names, layer.norm, d)
    if isinstance(m, MoeSpec):
        yield from _moe(m, d, names)
    elif m.gated:
        yield from _gated("mlp", layout, "", m.ffn, d, m.bias)
    else:
        yield from _dense("mlp.gate_up", (_matrix(names["up"], m.ffn, layout),), d, m.bias)
        yield from _dense("mlp.down", (_matrix(names["down"], d, layout),), m.ffn, m.bias)
    if isinstance(m, MoeSpec) and m.bias:
        yield "mlp.router_bias", (TensorPart(f"{names['router']}.bias", (m.experts,)),)
    if isinstance(m, MoeSpec) and m.routing.choice_bias:
        yield "mlp.choice_bias", (TensorPart(names["choice_bias"], (m.experts,)),)
    if layer.post_norm:
        yield from _norm("mlp.post_norm", names, layer.norm, d)


def _latent(a: AttentionSpec, m: LatentSpec, d: int, names: dict[str, str]) -> Iterator[tuple[str, Parts]]:
    """Of attention over latent vectors. The rows that rotate are the last ones, of a query head and of the latent."""
    if m.q_rank is not None:
        yield from _dense("attn.q_down", (TensorPart(names["q_down"], (m.q_rank,)),), d, m.bias)
        yield "attn.q_norm", (TensorPart(f"{names['q_latent_norm']}.weight", (m.q_rank,)),)
    query = _rotary_last(names["q" if m.q_rank is None else "q_up"], a.heads, m.nope_dim, m)
    yield from _dense("attn.q_up", query, m.q_rank or d, False)
    yield from _dense("attn.kv_down", _rotary_last(names["kv_down"], None, m.rank, m), d, m.bias)
    yield "attn.kv_norm", (TensorPart(f"{names['kv_latent_norm']}.weight", (m.rank,)),)
    rows = a.heads * (m.nope_dim + m.value_dim)
    yield "attn.kv_up", (TensorPart(f"{names['kv_up']}.weight", (rows, m.rank)),)


def _rotary_last(name: str, heads: int | None, others: int, m: LatentSpec) -> Parts:
    """Rows [heads, others + R] (None: no axis of heads) in which the last R rotate."""
    size = others + m.rope_dim
    shape = ((heads or 1) * size,)
    if not m.interleaved:
        return (TensorPart(name, shape),)

    def part(first: int, last: int, turned: int) -> TensorPart:
        cut, index = (first, last), (slice(first, last),)
        if heads is None:
            return TensorPart(name, shape, index, view=View(rows=shape, take=(cut,)), interleaved_heads=turned)
        view = View(rows=(heads, size), take=(None, cut))
        return TensorPart(name, shape, (slice(None), *index), view=view, interleaved_heads=turned)

    return part(0, others, 0), part(others, size, heads or 1)


def _matrix(name: str, rows: int, layout: Layout) -> TensorPart:
    return TensorPart(name, (rows,), view=View(transposed=layout.transposed))


def _head_norms(a: AttentionSpec, layout: Layout, rotary: int) -> Iterator[tuple[str, Parts]]:
    if a.qk_norm is None:
        return
    for norm, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
        name, group, dim = layout.names[norm], heads // a.kv_heads, a.head_dim
        turned: dict[str, Any] = {"interleaved_heads": heads, "rotary": rotary} if layout.interleaved else {}
        one: dict[str, Any] = turned | {"interleaved_heads": 1} if turned else {}
        parts: Parts = (TensorPart(f"{name}.weight", (dim,), **one),)
        if a.qk_norm_over == "all":
            parts = (TensorPart(f"{name}.weight", (heads * dim,), **turned),)
        elif a.qk_norm_over == "own" and "{h}" not in name:
            parts = (TensorPart(f"{name}.weight", (heads, dim), **turned),)
        elif a.qk_norm_over == "own":
            places = [divmod(h, group) if norm == "q_norm" else (h,) for h in range(heads)]
            parts = tuple(
                TensorPart(f"{name.replace('{h}', str(h))}.weight", (dim,), place, **one)
                for h, place in enumerate(places)
            )
        yield f"attn.{norm}", parts


def _gated(parameter: str, layout: Layout, key: str, ffn: int, d: int, bias: bool) -> Iterator[tuple[str, Parts]]:
    """A gated MLP, whose entries of the names start with ``key``."""
    names = layout.names
    if f"{key}gate_up" in names:
        gate_up: Parts = (TensorPart(names[f"{key}gate_up"], (2 * ffn,), view=View(rows=(2, ffn), take=((0, 2),))),)
    else:
        gate_up = tuple(TensorPart(names[f"{key}{part}"], (ffn,), (at,)) for at, part in enumerate(("gate", "up")))
    yield from _dense(f"{parameter}.gate_up", gate_up, d, bias)
    yield from _dense(f"{parameter}.down", (TensorPart(names[f"{key}down"], (d,)),), ffn, bias)


def _moe(m: MoeSpec, d: int, names: dict[str, str]) -> Iterator[tuple[str, Parts]]:
    yield "mlp.router", (TensorPart(f"{names['router']}.weight", (m.experts, d)),)
    if "experts_gate_up" in names:
        yield from _fused_experts(m, d, names)
    else:

        def of_experts(key: str, rows: int, index: Index) -> Parts:
            return tuple(TensorPart(names[key].replace("{e}", str(e)), (rows,), (e, *index)) for e in range(m.experts))

        gate_up = of_experts("expert_gate", m.ffn, (0,)) + of_experts("expert_up", m.ffn, (1,))
        yield from _dense("mlp.experts.gate_up", gate_up, d, m.bias)
        yield from _dense("mlp.experts.down", of_experts("expert_down", d, ()), m.ffn, m.bias)
    if m.shared_ffn is not None:
        if m.shared_gate:
            yield "mlp.shared.gate", (TensorPart(f"{names['shared_mix']}.weight", (1, d)),)
        yield from _gated("mlp.shared", Layout(names), "shared_", m.shared_ffn, d, False)


def _fused_experts(m: MoeSpec, d: int, names: dict[str, str]) -> Iterator[tuple[str, Parts]]:
    """All experts in one tensor, [E, in, out], whose rows of gate and up alternate (GPT-OSS)."""
    every, e = slice(None), m.experts
    views = [View(transposed=True, rows=(e, m.ffn, 2), take=(None, None, part)) for part in (0, 1)]
    gate_up = tuple(
        TensorPart(names["experts_gate_up"], (e, 2 * m.ffn), (every, i), view=v) for i, v in enumerate(views)
    )
    down = (TensorPart(names["experts_down"], (e, d), view=View(transposed=True)),)
    for parameter, parts, fan_in in (("gate_up", gate_up, d), ("down", down, m.ffn)):
        yield f"mlp.experts.{parameter}.weight", tuple(part.suffixed("", (fan_in,)) for part in parts)
        if m.bias:
            yield f"mlp.experts.{parameter}.bias", tuple(part.suffixed("_bias", ()) for part in parts)


def _qkv(a: AttentionSpec, layout: Layout, rotary: int) -> Parts:
    """Parts of the parameter [K, G + 2, H, ...]: of each KV head its G query heads, its key, its value."""
    group, every, names = a.heads // a.kv_heads, slice(None), layout.names
    places: tuple[Index, ...] = ((every, slice(0, group)), (every, group), (every, group + 1))
    sizes = (a.heads, a.kv_heads, a.kv_heads)
    if "qkv" in names or "qkv_by_head" in names:
        rows, dim = sum(sizes), a.head_dim
        if "qkv" in names:
            shape: tuple[int, ...] = (rows, dim)
            ends = (0, a.heads, a.heads + a.kv_heads, rows)
            takes: list[Any] = [((ends[i], ends[i + 1]),) for i in range(3)]
        else:
            shape, takes = (a.kv_heads, group + 2, dim), [(None, (0, group)), (None, group), (None, group + 1)]
        name = names.get("qkv") or names["qkv_by_head"]
        views = [View(layout.transposed, shape, take) for take in takes]
        return tuple(TensorPart(name, (rows * dim,), i, view=v) for i, v in zip(places, views, strict=True))
    return tuple(
        TensorPart(
            names[part],
            (heads * a.head_dim,),
            place,
            interleaved_heads=heads if layout.interleaved and part != "v" else 0,
            rotary=rotary if layout.interleaved and part != "v" else 0,
        )
        for part, heads, place in zip(("q", "k", "v"), sizes, places, strict=True)
    )


def _dense(parameter: str, parts: Parts, fan_in: int, bias: bool) -> Iterator[tuple[str, Parts]]:
    """Weight and bias of a Dense from the parts of its output axes."""
    yield f"{parameter}.weight", tuple(part.suffixed(".weight", (fan_in,)) for part in parts)
    if bias:
        yield f"{parameter}.bias", tuple(part.suffixed(".bias", ()) for part in parts)


def num_values(names: Names) -> int:
    """How many numbers the checkpoint holds."""
    return sum(math.prod(parts[0].shape) for _, parts in by_tensor(names).values())
