"""The building blocks against float64 numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.nn.linear import linear
from lmjax.nn.mlp import ACTIVATIONS, gated_mlp
from lmjax.nn.norm import rms_norm
from lmjax.nn.rope import apply_rope, rope_tables
from lmjax.nn.weight import Dense

RNG = np.random.default_rng(0)


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), jnp.dtype(dtype))


def exact(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_linear(dtype, bias, tokens):
    w = Dense(normal(3, 2, 5, 32, dtype=dtype), normal(3, 2, 5, dtype=dtype) if bias else None)
    x = normal(32, tokens, dtype=dtype)
    y = jax.jit(linear)(w, x)
    expected = np.einsum("abci,it->abct", exact(w.weight), exact(x)) + (exact(w.bias)[..., None] if bias else 0)
    assert y.dtype == x.dtype and y.shape == (3, 2, 5, tokens)
    np.testing.assert_allclose(exact(y), expected, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(48, 5), (2, 3, 16, 5)])
def test_rms_norm(shape):
    x, w = normal(*shape), normal(shape[-2])
    a = exact(x)
    expected = a / np.sqrt((a * a).mean(-2, keepdims=True) + 1e-3) * exact(w)[:, None]
    np.testing.assert_allclose(exact(rms_norm(x, w, 1e-3)), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_large_half_precision_does_not_overflow():
    x = jnp.full((8, 2), 3e4, jnp.float16)  # its square is past float16's range
    np.testing.assert_allclose(exact(rms_norm(x, jnp.ones(8, jnp.float16), 1e-6)), 1.0, rtol=1e-3)


@pytest.mark.parametrize("rotary", [16, 10])
def test_rope(rotary):
    """Pairs (i, i + R/2) turn by position * frequency; features from R on stay."""
    x, positions = normal(3, 16, 4), np.array([0, 1, 77, 5000], np.int32)
    freq = (100.0 ** -(np.arange(0, rotary, 2) / rotary)).astype(np.float32)
    y = exact(apply_rope(x, *rope_tables(freq, 1.5, jnp.asarray(positions))))
    half = rotary // 2
    turn = np.exp(1j * freq.astype(np.float64)[:, None] * positions) * 1.5
    z = (exact(x)[:, :half] + 1j * exact(x)[:, half:rotary]) * turn
    np.testing.assert_allclose(y[:, :half], z.real, atol=2e-3)
    np.testing.assert_allclose(y[:, half:rotary], z.imag, atol=2e-3)
    np.testing.assert_allclose(y[:, :rotary, :3], np.concatenate([z.real, z.imag], 1)[..., :3], atol=2e-5)
    np.testing.assert_array_equal(y[:, rotary:], exact(x)[:, rotary:])


REFERENCE = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_mlp(name):
    gate_up, down, x = Dense(normal(2, 12, 8), normal(2, 12)), Dense(normal(8, 12), normal(8)), normal(8, 3)
    gate, up = np.einsum("afd,dt->aft", exact(gate_up.weight), exact(x)) + exact(gate_up.bias)[..., None]
    expected = exact(down.weight) @ (np.vectorize(REFERENCE[name])(gate) * up) + exact(down.bias)[:, None]
    np.testing.assert_allclose(exact(gated_mlp(gate_up, down, x, name)), expected, rtol=1e-4, atol=1e-4)
