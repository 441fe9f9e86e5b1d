"""Normalisation of feature-major activations, of whole tokens and of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lmjax.nn.env import Env
from pallas_kernels.heads import rms_norm

__all__ = ["LayerNorm", "NormSpec", "normed", "normed_heads", "rms_norm"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """``rms``: RMSNorm, the weight w or, ``plus_one``, 1 + w. ``layer``: LayerNorm with a weight, perhaps a bias."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    plus_one: bool = False
    bias: bool = False


@struct.dataclass
class LayerNorm:
    """Parameters of a LayerNorm; those of an RMSNorm are an array."""

    weight: Any  # [features]
    bias: Any = None  # [features]


def normed(x: jax.Array, p: Any, spec: NormSpec) -> jax.Array:
    """The norm over axis -2: x [..., features, T] -> its shape and dtype."""
    if spec.kind == "layer":
        return _layer_norm(x, p.weight, p.bias, spec.eps)
    return rms_norm(x, p, spec.eps, spec.plus_one)


def normed_heads(x: jax.Array, weight: jax.Array, spec: NormSpec, together: bool, env: Env) -> jax.Array:
    """x [K, ..., H, T] by heads, weight [K, ..., H]: the norm of each head, or of all heads ``together`` (RMSNorm).

    A KV head that several devices hold is counted as often by all of them, which leaves the mean as it is.
    """
    if not together:
        return _layer_norm(x, weight, None, spec.eps) if spec.kind == "layer" else _scaled_rms(x, weight, spec, -2)
    return _scaled_rms(x, weight, spec, tuple(range(x.ndim - 1)), env)


def _scaled_rms(
    x: jax.Array, weight: jax.Array, spec: NormSpec, axes: int | tuple[int, ...], env: Env | None = None
) -> jax.Array:
    xf = x.astype(jnp.float32)
    mean = jnp.mean(xf * xf, axis=axes, keepdims=True)
    if env is not None and env.axis is not None:
        mean = lax.pmean(mean, env.axis)
    y = (xf * lax.rsqrt(mean + jnp.float32(spec.eps))).astype(x.dtype)
    return y * _along(weight, x.ndim).astype(x.dtype)


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """LayerNorm (Ba et al., 2016), in float32 and rounded once, as in torch."""
    xf = x.astype(jnp.float32)
    centred = xf - jnp.mean(xf, axis=-2, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-2, keepdims=True)
    y = centred * lax.rsqrt(variance + jnp.float32(eps)) * _along(weight, x.ndim)
    if bias is not None:
        y = y + _along(bias, x.ndim)
    return y.astype(x.dtype)


def _along(weight: jax.Array, ndim: int) -> jax.Array:
    """float32, [..., features] against [..., features, T] of ``ndim`` axes."""
    return weight.astype(jnp.float32).reshape((1,) * (ndim - 1 - weight.ndim) + (*weight.shape, 1))
