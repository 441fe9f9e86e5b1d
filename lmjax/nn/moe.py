"""Mixture of experts: each token passes the ``top_k`` experts that a router picks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.nn.env import Env
from lmjax.nn.linear import matmul
from lmjax.nn.mlp import gated_mlp
from lmjax.nn.weight import Dense
from pallas_kernels.grouped_matmul import combine, default_block_rows, grouped_matmul, route
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
    target: Target = CPU,
) -> jax.Array:
    """``sum_e p_e down_e(act(gate_e(x)) * up_e(x))`` over each token's experts e -> [D, T] in x's dtype.

    p: softmax of the router over all E experts, divided by the sum of those picked if ``normalise``. Float32
    throughout but for the operands of the products. Source: Mixtral of Experts (Jiang et al., 2024).
    """
    tokens, experts = x.shape[1], gate_up.weight.shape[0]
    if target.platform == "cuda":
        # XLA fuses the norm's last product into the router's matrix product and then makes a kernel of it for us, too
        x = lax.optimization_barrier(x)
    rows = x.T
    weights, groups = route(
        matmul(router, x).T,
        num_tokens,
        top_k=top_k,
        normalise=normalise,
        block_rows=default_block_rows(tokens, top_k, router.shape[0], target),
        first=first,
        count=experts,
        target=target,
    )
    h = grouped_matmul(rows, gate_up.weight, groups, activation=activation, target=target)
    y = grouped_matmul(h, down.weight, groups, sorted_rows=True, target=target)
    return combine(y, weights, groups).T


def shared_expert(
    gate: jax.Array, gate_up: Dense, down: Dense, x: jax.Array, activation: str, target: Target = CPU
) -> jax.Array:
    """``sigmoid(gate @ x)`` times a gated MLP: gate [1, D], gate_up [2, F, D], down [D, F], x [D, T] -> [D, T]. Of a
    share of F the results add up."""
    mix = jax.nn.sigmoid(matmul(gate, x))  # float32 [1, T]
    return (mix * gated_mlp(gate_up, down, x, activation, Env(target)).astype(jnp.float32)).astype(x.dtype)
