"""Matrix products on feature-major activations ``[features, T]``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.nn.env import ALONE, Env
from lmjax.nn.lora import lora_product
from lmjax.nn.weight import Dense, Quantized
from pallas_kernels.quant_matmul import QuantWeight, quant_matmul


def linear(w: Dense, x: jax.Array, env: Env = ALONE) -> jax.Array:
    """``W @ x + b``, and what adapters add to it: x [in, T] -> [*out, T] in x's dtype, accumulated in float32.

    The weight is the left operand: on XLA:CPU ``W @ x`` runs at twice the speed of ``x.T @ W.T`` for 2 to 64 tokens
    and is equal elsewhere.
    """
    if isinstance(w.weight, Quantized):
        out = w.weight.values.shape[1:]
        y = quantized_matmul(w.weight, x, env)
    else:
        out = w.weight.shape[:-1]
        y = matmul(w.weight.reshape(-1, w.weight.shape[-1]), x)
    if w.bias is not None:
        y = y + w.bias.reshape(-1, 1).astype(jnp.float32)
    y = y.astype(x.dtype).reshape(*out, x.shape[-1])
    # added to what is rounded, as in peft: a card would write and read both in float32
    return y if w.lora is None else y + lora_product(w.lora, x)


def summed_linear(w: Dense, x: jax.Array, env: Env) -> jax.Array:
    """``linear`` where each device has a share of the input features: the products are summed, the bias added once."""
    if env.axis is None:
        return linear(w, x, env)
    y = env.sum(linear(Dense(w.weight, lora=w.lora), x, env))
    return y if w.bias is None else y + w.bias.reshape(*w.bias.shape, 1).astype(y.dtype)


def matmul(w: jax.Array, x: jax.Array) -> jax.Array:
    """w [out, in] @ x [in, T] -> float32 [out, T]."""
    return lax.dot_general(w, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def quantized_matmul(w: Quantized, x: jax.Array, env: Env) -> jax.Array:
    """w [in, *out], x [in, T] -> float32 [out, T]."""

    def flat(a: jax.Array, lead: int) -> jax.Array:
        return a.reshape(*a.shape[:lead], -1)

    kind, lead = w.packing.kind, 1 if w.packing.group else 0
    zero = None if w.zero is None else flat(w.zero, lead)
    grouped = f"{kind}_group" if lead and w.packing.per_byte == 1 else kind
    weight = QuantWeight(flat(w.values, 1), flat(w.scale, lead), zero, grouped)  # type: ignore[arg-type]
    return quant_matmul(x.T, weight, out_dtype=jnp.float32, target=env.target).T
