"""Gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lmjax.nn.linear import linear
from lmjax.nn.weight import Dense

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def gated_mlp(gate_up: Dense, down: Dense, x: jax.Array, activation: str) -> jax.Array:
    """``down(act(gate(x)) * up(x))``: gate_up [2, F, D], down [D, F], x [D, T] -> [D, T]. The product is in float32."""
    gate, up = linear(gate_up, x).astype(jnp.float32)
    return linear(down, (ACTIVATIONS[activation](gate) * up).astype(x.dtype))
