"""What a decoder is, as data. A new architecture is a function from its config.json to a ``DecoderSpec``.

All specs are frozen and hashable: they are static arguments of the compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lmjax.nn.norm import NormSpec
from lmjax.nn.packing import Packing
from lmjax.nn.routing import Routing

__all__ = [
    "AttentionSpec",
    "DecoderSpec",
    "LatentSpec",
    "LayerSpec",
    "MlpSpec",
    "MoeSpec",
    "NormSpec",
    "RopeSpec",
    "Routing",
    "group_layers",
]

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the first ``dim`` features of a head (halves rotate, as in GPT-NeoX and HF Llama).

    Everything that depends on the served length is resolved here, once (see ``lmjax.models.rope``): ``seq_len`` of
    kind ``dynamic`` and ``factors`` of kind ``longrope`` follow from the engine's ``max_model_len``.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, dynamic, llama3, yarn
    original_len: int = 0  # dynamic, llama3, yarn, longrope: the length the model was first trained for
    seq_len: int = 0  # dynamic: the length that fixes the base
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, [dim / 2]
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Keys and values of all heads in one vector a token (``models.latent``)."""

    rank: int  # C, of the latent vector
    rope_dim: int  # R, of the rotary key that all heads share
    nope_dim: int  # Q, features of a query head that do not rotate
    value_dim: int  # V, features of a value head
    q_rank: int | None = None  # of the queries' own latent vector; None: they are made of x
    bias: bool = False  # of the products that give the latent vectors
    eps: float = 1e-6  # of the latent vectors' RMSNorms
    interleaved: bool = True  # in checkpoints the rotary pairs are neighbours


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """With ``latent`` there is one KV head, the stored vector of H = C + R features, which queries are made to fit."""

    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    group: int  # index of the layer's KV group
    index: int  # index of the layer within its KV group
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None  # of queries and keys, before rope
    # what one mean is taken over: a head, with one weight for all heads; a head with a weight of its own; all heads
    qk_norm_over: Literal["head", "own", "all"] = "head"
    window: int | None = None  # tokens a query sees, itself included; None: all
    rope: int | None = 0  # which of ``DecoderSpec.ropes``; None: no rotary embedding
    softmax_scale: float | None = None  # None: H ** -0.5
    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    clip: float | None = None  # queries, keys and values are clipped at it
    sinks: bool = False  # a learned logit per head in the softmax's denominator
    alibi: tuple[float, ...] = ()  # slopes of all heads of the model: logits += slope * (key - query position)
    latent: LatentSpec | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def value_dim(self) -> int:
        """Features of what attention gives a head, out of the KV pool."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def num_values(self) -> int:
        """Features of all heads together before the last product."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def flops_per_key(self) -> float:
        """Of a token that attends to another, over all heads."""
        return 2.0 * self.heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """``down(act(gate(x)) * up(x))``, or without a gate ``down(act(up(x)))``."""

    ffn: int  # F
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Experts (gated MLPs), of which a router picks ``top_k`` for each token; their outputs are added, each times the
    router's softmax over all experts, or as ``routing`` has it. ``shared_ffn``: one more expert for every token, times
    ``sigmoid(gate(x))`` with a ``shared_gate``."""

    experts: int  # E
    top_k: int
    ffn: int  # F of one expert
    activation: Activation = "silu"
    normalise: bool = False  # the picked experts' weights are divided by their sum
    shared_ffn: int | None = None
    shared_gate: bool = True
    routing: Routing = Routing()
    bias: bool = False  # of the router and of every expert's matrices
    # gate and up are clamped at it and the product is gate * sigmoid(1.702 gate) * (up + 1), as in GPT-OSS
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """``x += attention(norm(x)); x += mlp(norm(x))``, each of the four steps as the fields have it."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    norm: NormSpec
    pre_norm: bool = True  # of what goes into attention and into the MLP
    post_norm: bool = False  # of what comes out of them
    parallel: bool = False  # the MLP reads what attention reads, and both are added at once
    shared_norm: bool = False  # parallel: one norm for both
    residual_scale: float = 1.0  # of what is added
    packing: tuple[tuple[str, Packing], ...] = ()  # of its matrices that are not plain floats ("attn.qkv.weight")

    @property
    def kind(self) -> LayerSpec:
        """The spec without the layer's place: equal for all layers that run the same code."""
        return replace(self, attention=replace(self.attention, index=0))


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder of any mix of layers, between an embedding and a head."""

    model_type: str
    hidden: int  # D
    vocab: int  # V, rows of the embedding
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]  # layers name theirs by its index
    norm: NormSpec  # before the head
    tie_embeddings: bool  # the head is the embedding
    max_len: int  # longest sequence to serve: max_model_len, or the model's own if that was None
    vocab_rows: int | None = None  # rows of embedding and head, if not V: padded, or one device's share
    stages: int = 1  # of a pipeline. With more than one ``layers`` are a stage's: all stages have the same kinds

    positions: int | None = None  # rows of a learned table of positions, added to the embedding
    embed_scale: float = 1.0  # of the embedding, in the weights' type
    embed_norm: NormSpec | None = None  # after it
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)

    @property
    def rope(self) -> RopeSpec:
        """The first one, of most models the only one."""
        return self.ropes[0]

    @property
    def num_vocab_rows(self) -> int:
        return self.vocab if self.vocab_rows is None else self.vocab_rows


def group_layers(kinds: list[tuple[int | None, int, int]]) -> list[tuple[int, int]]:
    """(group, index in group) of each layer; layers with equal (window, kv_heads, head_dim) share a KV group.

    Groups are numbered by first appearance.
    """
    groups: dict[tuple[int | None, int, int], int] = {}
    sizes: dict[int, int] = {}
    places = []
    for kind in kinds:
        group = groups.setdefault(kind, len(groups))
        places.append((group, sizes.get(group, 0)))
        sizes[group] = sizes.get(group, 0) + 1
    return places
