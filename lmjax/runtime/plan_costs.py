"""What one device holds and does in a step, as exact arithmetic on a decoder's spec; and the roofline of that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lmjax.models.params import layer_of, named_leaves, param_specs
from lmjax.models.spec import DecoderSpec, LayerSpec, MoeSpec
from lmjax.parallel.rules import PP, TP, num_shares, partition_specs
from lmjax.parallel.split import Degree
from lmjax.runtime.cards import Card
from lmjax.runtime.hlo import Collective
from lmjax.types import KVSpec

Bound = Literal["memory", "compute", "links"]


@dataclass(frozen=True, slots=True)
class Weights:
    """One device's share. Numbers of parameters, by how often a step reads and multiplies them.

    ``dense``: once a token; ``head``: once a row that samples; ``experts``: (parameters, bytes, top_k / E) a layer, of
    which a token needs that share; ``looked_up``: the embedding, where it is not the head, too.
    """

    total: int
    bytes: int
    item_bytes: int  # of embedding, head, and activations
    dense: int
    dense_bytes: int
    head: int
    experts: tuple[tuple[int, int, float], ...]
    hidden: int

    def flops(self, tokens: int, rows: int) -> float:
        chosen = sum(n * share for n, _, share in self.experts)
        return 2.0 * (tokens * (self.dense + chosen) + rows * self.head)

    def bytes_read(self, tokens: int) -> float:
        """An expert is read if any token picks it; picks are taken as independent and even."""
        used = sum(size * (1 - (1 - share) ** tokens) for _, size, share in self.experts)
        return self.dense_bytes + used + self.item_bytes * (self.head + tokens * self.hidden)


def weights_of(spec: DecoderSpec, dtype: str, degree: Degree) -> Weights:
    """spec: what all devices hold together (``parallel.split.spread``)."""
    places = named_leaves(partition_specs(spec, degree.expert_parallel))
    sizes = {TP: degree.tp, PP: degree.pp}
    total = num_bytes = dense = dense_bytes = head = 0
    experts = []
    for name, param in named_leaves(param_specs(spec)).items():
        count = math.prod(param.shape) // num_shares(places[name], sizes)
        size = count * jnp.dtype(param.dtype or dtype).itemsize
        num_bytes += size
        if name.endswith((".scale", ".zero")):  # of a packed matrix
            count = 0
        elif name.endswith(".values") and param.dtype == "uint8":
            count *= 2
        total += count
        if name == "head" or (name == "embed" and spec.tie_embeddings):
            head += count
        elif ".experts." in name:
            experts.append((count, size, _picked(spec, name)))
        elif name not in ("embed", "positions"):
            dense += count
            dense_bytes += size
    return Weights(total, num_bytes, jnp.dtype(dtype).itemsize, dense, dense_bytes, head, tuple(experts), spec.hidden)


def _picked(spec: DecoderSpec, name: str) -> float:
    layer = layer_of(name)
    assert layer is not None
    mlp = spec.layers[layer].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp.top_k / mlp.experts


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds that a step takes at least. Reading and computing overlap; collectives come on top, without latency."""

    memory_seconds: float
    compute_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds) + self.link_seconds

    @property
    def bound(self) -> Bound:
        parts: dict[Bound, float] = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "links": self.link_seconds,
        }
        return max(parts, key=lambda name: parts[name])


def roofline(
    card: Card,
    weights: Weights,
    spec: DecoderSpec,
    kv: tuple[KVSpec, ...],
    *,
    tokens: int,
    rows: int,
    context: float,
    collectives: tuple[Collective, ...],
    devices: int,
) -> Step:
    """A step of ``tokens`` tokens in ``rows`` sequences; a token sees ``context`` positions, itself included.

    spec and kv: one device's share. Prefill reads the keys and values of a sequence once, not once a token.
    """
    read = weights.bytes_read(tokens) + rows * kv_bytes_read(kv, context)
    flops = weights.flops(tokens, rows) + tokens * sum(_attention_flops(layer, context) for layer in spec.layers)
    peak = card.bf16_flops / (2 if weights.item_bytes == 4 else 1)  # TF32 runs at half of bf16's rate
    links = sum(_link_bytes(c, devices) for c in collectives) / card.link_bandwidth
    return Step(read / card.memory_bandwidth, flops / peak, links)


def kv_bytes_read(kv: tuple[KVSpec, ...], context: float) -> float:
    """Bytes of keys and values that a query at the end of ``context`` positions attends to."""
    return sum(spec.bytes_per_token() * min(context, spec.window or context) for spec in kv)


def _attention_flops(layer: LayerSpec, context: float) -> float:
    a = layer.attention
    return a.flops_per_key * min(context, a.window or context)


def _link_bytes(collective: Collective, devices: int) -> float:
    """What one device sends in a ring: an all-reduce passes everything around twice."""
    share = (devices - 1) / devices
    return collective.bytes * share * (2 if collective.kind == "all-reduce" else 1)


def bytes_per_device(tree: Any, devices: int) -> int:
    """Of abstract arrays, placed or not, on one device."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None or devices == 1 else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
