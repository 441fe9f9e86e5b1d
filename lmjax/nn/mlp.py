"""The MLP, with a gate or without."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lmjax.nn.env import ALONE, Env
from lmjax.nn.linear import linear, summed_linear
from lmjax.nn.weight import Dense
from pallas_kernels.activation import ACTIVATIONS


def gated_mlp(gate_up: Dense, down: Dense, x: jax.Array, activation: str, env: Env = ALONE) -> jax.Array:
    """``down(act(gate(x)) * up(x))``: gate_up [2, F, D], down [D, F], x [D, T] -> [D, T]. The product is in float32."""
    gate, up = linear(gate_up, x, env).astype(jnp.float32)
    return summed_linear(down, (ACTIVATIONS[activation](gate) * up).astype(x.dtype), env)


def plain_mlp(up: Dense, down: Dense, x: jax.Array, activation: str, env: Env = ALONE) -> jax.Array:
    """``down(act(up(x)))``: up [1, F, D], down [D, F], x [D, T] -> [D, T]."""
    (h,) = linear(up, x, env).astype(jnp.float32)
    return summed_linear(down, ACTIVATIONS[activation](h).astype(x.dtype), env)
