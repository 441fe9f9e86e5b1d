"""Mixture of experts: each token passes the ``top_k`` experts that a router picks for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.nn.env import Env
from lmjax.nn.linear import matmul
from lmjax.nn.mlp import gated_mlp
from lmjax.nn.routing import Routing, pick
from lmjax.nn.weight import Dense, Quantized
from pallas_kernels.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul import (
    Groups,
    QuantStack,
    combine,
    default_block_rows,
    group_rows,
    grouped_matmul,
    route,
)
from pallas_kernels.platform import CPU, Target


def moe_mlp(
    router: jax.Array,  # [E, D]
    gate_up: Dense,  # [G, 2, F, D]  of the experts first .. first + G - 1
    down: Dense,  # [G, D, F]
    x: jax.Array,  # [D, T]
    num_tokens: jax.Array,  # int32 []  later tokens are padding: they cost nothing and give 0
    *,
    top_k: int,
    normalise: bool,
    activation: str,
    first: int | jax.Array = 0,  # where the experts are spread over devices; the results then add up to the whole
    router_bias: jax.Array | None = None,  # [E]
    choice_bias: jax.Array | None = None,  # float32 [E]
    routing: Routing = Routing(),
    limit: float | None = None,  # the product is ``clamped_swiglu`` instead
    target: Target = CPU,
) -> jax.Array:
    """``sum_e p_e down_e(act(gate_e(x)) * up_e(x))`` over each token's experts e -> [D, T] in x's dtype.

    p: softmax of the router over all E experts, divided by the sum of those picked if ``normalise``; or as ``routing``
    has it. Float32 throughout but for the operands of the products. Source: Mixtral of Experts (Jiang et al., 2024).
    """
    tokens, experts = x.shape[1], num_experts(gate_up)
    if target.platform == "cuda":
        # XLA fuses the norm's last product into the router's matrix product and then makes a kernel of it for us, too
        x = lax.optimization_barrier(x)
        scores = matmul(router, x).T
    else:  # XLA:CPU has no product of so few rows of bfloat16 with a result in float32
        scores = matmul(router.astype(jnp.float32), x.astype(jnp.float32)).T
    rows = x.T
    if router_bias is not None:
        scores = scores + router_bias.astype(jnp.float32)[None, :]
    block_rows = default_block_rows(tokens, top_k, router.shape[0], target)
    if routing.is_softmax:
        weights, groups = route(
            scores,
            num_tokens,
            top_k=top_k,
            normalise=normalise,
            block_rows=block_rows,
            first=first,
            count=experts,
            target=target,
        )
        if routing.factor != 1.0:
            weights = weights * jnp.float32(routing.factor)
    else:  # the kernel that routes knows a softmax alone
        weights, ids = pick(scores, choice_bias, routing, top_k, normalise)
        real = jnp.arange(tokens, dtype=jnp.int32)[:, None] < num_tokens
        ids = jnp.where(real, ids - first, -1)
        groups = group_rows(ids, groups=experts, block_rows=block_rows, target=target)
    if gate_up.bias is None and limit is None:
        h = _products(gate_up.weight, rows, groups, activation=activation, target=target)
    else:  # the kernel has no bias: what comes before the product is written out once
        parts = _products(gate_up.weight, rows, groups, together=True, target=target)
        h = _product(_biased(parts, gate_up.bias, groups), activation, limit)
    y = _products(down.weight, h, groups, sorted_rows=True, target=target)
    return combine(_biased(y, down.bias, groups), weights, groups).T


def num_experts(stack: Dense) -> int:
    """G of matrices [G, ...], packed or not."""
    weight = stack.weight
    return (weight.values if isinstance(weight, Quantized) else weight).shape[0]


def _products(w: Any, x: jax.Array, groups: Groups, *, together: bool = False, **how: Any) -> jax.Array:
    """``grouped_matmul`` with a weight of any type; ``together``: gate and up [G, 2, N, K] as one, [G, 2 N, K]."""
    if not isinstance(w, Quantized):
        return grouped_matmul(x, w.reshape(w.shape[0], -1, w.shape[-1]) if together else w, groups, **how)
    values, scale, zero = w.values, w.scale, w.zero
    count = values.shape[0]
    if not w.packing.group:  # values as plain numbers lie: [G, 2, N, K]
        if together:
            values, scale = values.reshape(count, -1, values.shape[-1]), scale.reshape(count, -1)
        return grouped_matmul(x, values, groups, scale=scale, **how)
    if together:
        values, scale, zero = jax.tree.map(lambda a: a.reshape(*a.shape[:2], -1), (values, scale, zero))
    kind: Any = w.packing.kind if w.packing.per_byte == 2 else f"{w.packing.kind}_group"
    return grouped_matmul(x, QuantStack(values, scale, zero, kind), groups, **how)


def _biased(y: jax.Array, bias: jax.Array | None, groups: Groups) -> jax.Array:
    """y [M, N] plus each row's group's bias [G, ...], N numbers a group; undefined in blocks of no group."""
    if bias is None:
        return y
    own = jnp.take(bias.reshape(bias.shape[0], -1), groups.block_groups, axis=0, mode="clip")  # [M / BM, N]
    blocks = y.reshape(own.shape[0], -1, y.shape[1]).astype(jnp.float32) + own[:, None].astype(jnp.float32)
    return blocks.reshape(y.shape).astype(y.dtype)


def _product(parts: jax.Array, activation: str, limit: float | None) -> jax.Array:
    """[M, 2 F], gate and up -> [M, F]."""
    gate, up = jnp.split(parts.astype(jnp.float32), 2, axis=1)
    y = ACTIVATIONS[activation](gate) * up if limit is None else clamped_swiglu(gate, up, limit)
    return y.astype(parts.dtype)


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """``g sigmoid(1.702 g) (u + 1)`` with gate and up clamped (GPT-OSS's reference code); float32."""
    gate, up = jnp.minimum(gate, jnp.float32(limit)), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(jnp.float32(1.702) * gate) * (up + 1.0)


def shared_expert(
    gate: jax.Array | None, gate_up: Dense, down: Dense, x: jax.Array, activation: str, target: Target = CPU
) -> jax.Array:
    """``sigmoid(gate @ x)`` (1 without a gate) times a gated MLP: gate [1, D], gate_up [2, F, D], down [D, F], x [D, T]
    -> [D, T]. Of a share of F the results add up."""
    y = gated_mlp(gate_up, down, x, activation, Env(target))
    if gate is None:
        return y
    mix = jax.nn.sigmoid(matmul(gate, x))  # float32 [1, T]
    return (mix * y.astype(jnp.float32)).astype(x.dtype)
