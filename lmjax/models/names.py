"""Where each parameter comes from: tensor names of Hugging Face checkpoints and of llama.cpp's GGUF files.

A parameter may be made of several tensors (q, k and v; gate and up). Each ``TensorPart`` says which slice of the
parameter its tensor fills, so that a loader goes tensor by tensor and never needs two of them in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmjax.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class TensorPart:
    """One tensor of a checkpoint: ``parameter[index]`` holds its values in the same order (reshaped)."""

    name: str
    shape: tuple[int, ...]  # of the tensor in the checkpoint
    index: Index = ()
    # llama.cpp stores the q and k rows of the llama architecture with the two rotary halves of each head interleaved
    interleaved_heads: int = 0

    def fill(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        """Write the tensor into its part of the parameter. ValueError if the shape is not ``self.shape``."""
        if tensor.shape != self.shape:
            raise ValueError(f"{self.name}: has shape {list(tensor.shape)}, the config asks for {list(self.shape)}")
        target = parameter[self.index]
        parameter[self.index] = self.in_order(tensor).reshape(target.shape)

    def in_order(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor with its rows in the parameter's order."""
        return _swap_halves(tensor, self.interleaved_heads, (-1, 2)) if self.interleaved_heads else tensor

    def extract(self, parameter: Any) -> Any:
        """The tensor of the checkpoint back from the parameter (numpy or jax): the inverse of ``fill``."""
        tensor = parameter[self.index].reshape(self.shape)
        return _swap_halves(tensor, self.interleaved_heads, (2, -1)) if self.interleaved_heads else tensor


def _swap_halves(tensor: Any, heads: int, split: tuple[int, int]) -> Any:
    """Rows [heads * H, ...] of each head, seen as [a, b], in the order [b, a]."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, *split, *rest).swapaxes(1, 2).reshape(tensor.shape)


Names = dict[str, tuple[TensorPart, ...]]  # parameter (dotted path, see params.named_leaves) -> its tensors

# parameter's part -> name in the checkpoint; {i} is the layer
_HF = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn.norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "o": "model.layers.{i}.self_attn.o_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "mlp.norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
}
# of a layer with experts; {e} is the expert. Mixtral has its own names, and none for a shared expert.
_HF_MOE = {
    "router": "model.layers.{i}.mlp.gate.weight",
    "expert_gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "expert_up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "expert_down": "model.layers.{i}.mlp.experts.{e}.down_proj",
    "shared_mix": "model.layers.{i}.mlp.shared_expert_gate.weight",
    "shared_gate": "model.layers.{i}.mlp.shared_expert.gate_proj",
    "shared_up": "model.layers.{i}.mlp.shared_expert.up_proj",
    "shared_down": "model.layers.{i}.mlp.shared_expert.down_proj",
}
_HF_MIXTRAL = {
    "router": "model.layers.{i}.block_sparse_moe.gate.weight",
    "expert_gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "expert_up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "expert_down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}
_HF_EXPERTS = {"mixtral": _HF_MIXTRAL}  # by model_type, default _HF_MOE
_GGUF = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn.norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "o": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "mlp.norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
}
_GGUF_INTERLEAVED = ("llama", "mistral")  # both are llama.cpp's "llama" architecture


def hf_names(spec: DecoderSpec) -> Names:
    """Every parameter's tensors in a Hugging Face checkpoint."""
    return dict(_names(spec, _HF | _HF_EXPERTS.get(spec.model_type, _HF_MOE), interleaved=False))


def gguf_names(spec: DecoderSpec) -> Names:
    """Every parameter's tensors in a GGUF file; shapes as numpy sees them ([out, in], GGUF's own order reversed).

    ValueError for a model with experts: GGUF files of those are not read.
    """
    if any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        raise ValueError(f"{spec.model_type}: experts in a GGUF file are not supported")
    return dict(_names(spec, _GGUF, interleaved=spec.model_type in _GGUF_INTERLEAVED))


def by_tensor(names: Names) -> dict[str, tuple[str, TensorPart]]:
    """{tensor name: (parameter, part)}."""
    return {part.name: (parameter, part) for parameter, parts in names.items() for part in parts}


def harmless(name: str, spec: DecoderSpec) -> bool:
    """Tensors that a checkpoint may hold and no parameter needs: recomputed tables, and the copy of a tied head."""
    if name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")):
        return True
    return spec.tie_embeddings and name in (_HF["head"], _GGUF["head"])


def _names(spec: DecoderSpec, table: dict[str, str], interleaved: bool) -> Iterator[tuple[str, tuple[TensorPart, ...]]]:
    d, v = spec.hidden, spec.vocab
    yield "embed", (TensorPart(table["embed"], (v, d)),)
    for i, layer in enumerate(spec.layers):
        names = {key: value.replace("{i}", str(i)) for key, value in table.items()}
        for parameter, parts in _layer(layer, d, names, interleaved):
            yield f"layers.{i}.{parameter}", parts
    yield "norm", (TensorPart(table["norm"], (d,)),)
    if not spec.tie_embeddings:
        yield "head", (TensorPart(table["head"], (v, d)),)


def _layer(
    layer: LayerSpec, d: int, names: dict[str, str], interleaved: bool
) -> Iterator[tuple[str, tuple[TensorPart, ...]]]:
    a, m = layer.attention, layer.mlp
    yield "attn.norm", (TensorPart(names["attn.norm"], (d,)),)
    yield from _dense("attn.qkv", _qkv(a, names, interleaved), d, a.qkv_bias)
    yield from _dense("attn.o", (TensorPart(names["o"], (d,)),), a.heads * a.head_dim, a.o_bias)
    if a.qk_norm:
        yield "attn.q_norm", (TensorPart(names["q_norm"], (a.head_dim,)),)
        yield "attn.k_norm", (TensorPart(names["k_norm"], (a.head_dim,)),)
    yield "mlp.norm", (TensorPart(names["mlp.norm"], (d,)),)
    if isinstance(m, MoeSpec):
        yield from _moe(m, d, names)
    else:
        yield from _gated("mlp", names, "", m.ffn, d, m.bias)


def _gated(
    parameter: str, names: dict[str, str], key: str, ffn: int, d: int, bias: bool
) -> Iterator[tuple[str, tuple[TensorPart, ...]]]:
    """A gated MLP, whose entries of ``names`` start with ``key``."""
    gate_up = tuple(TensorPart(names[f"{key}{part}"], (ffn,), (at,)) for at, part in enumerate(("gate", "up")))
    yield from _dense(f"{parameter}.gate_up", gate_up, d, bias)
    yield from _dense(f"{parameter}.down", (TensorPart(names[f"{key}down"], (d,)),), ffn, bias)


def _moe(m: MoeSpec, d: int, names: dict[str, str]) -> Iterator[tuple[str, tuple[TensorPart, ...]]]:
    yield "mlp.router", (TensorPart(names["router"], (m.experts, d)),)

    def of_experts(key: str, rows: int, index: Index) -> tuple[TensorPart, ...]:
        return tuple(TensorPart(names[key].replace("{e}", str(e)), (rows,), (e, *index)) for e in range(m.experts))

    gate_up = of_experts("expert_gate", m.ffn, (0,)) + of_experts("expert_up", m.ffn, (1,))
    yield from _dense("mlp.experts.gate_up", gate_up, d, False)
    yield from _dense("mlp.experts.down", of_experts("expert_down", d, ()), m.ffn, False)
    if m.shared_ffn is not None:
        yield "mlp.shared.gate", (TensorPart(names["shared_mix"], (1, d)),)
        yield from _gated("mlp.shared", names, "shared_", m.shared_ffn, d, False)


def _qkv(a: AttentionSpec, names: dict[str, str], interleaved: bool) -> tuple[TensorPart, ...]:
    """Parts of the parameter [K, G + 2, H, ...]: of each KV head its G query heads, its key, its value."""
    group, every = a.heads // a.kv_heads, slice(None)
    kv = (a.kv_heads * a.head_dim,)
    return (
        TensorPart(names["q"], (a.heads * a.head_dim,), (every, slice(0, group)), a.heads if interleaved else 0),
        TensorPart(names["k"], kv, (every, group), a.kv_heads if interleaved else 0),
        TensorPart(names["v"], kv, (every, group + 1)),
    )


def _dense(
    parameter: str, parts: tuple[TensorPart, ...], fan_in: int, bias: bool
) -> Iterator[tuple[str, tuple[TensorPart, ...]]]:
    """Weight and bias of a Dense from the parts of its output axes."""

    def suffixed(suffix: str, tail: tuple[int, ...]) -> tuple[TensorPart, ...]:
        return tuple(TensorPart(f"{p.name}.{suffix}", p.shape + tail, p.index, p.interleaved_heads) for p in parts)

    yield f"{parameter}.weight", suffixed("weight", (fan_in,))
    if bias:
        yield f"{parameter}.bias", suffixed("bias", ())


def num_values(names: Names) -> int:
    """How many numbers the checkpoint holds."""
    return sum(math.prod(part.shape) for parts in names.values() for part in parts)
