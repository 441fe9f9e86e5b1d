"""A product with adapters against float64 numpy: dense and quantised weights, one part and several."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.nn.linear import linear
from lmjax.nn.lora import Lora
from lmjax.nn.packing import Packing
from lmjax.nn.weight import Dense, Quantized
from tests.nn.test_nn import exact, normal

RANK, SLOTS = 8, 3
PARTS = {  # shapes of the parts of a matrix, and the axis that they are joined on
    "one": (((12,),), 0),
    "gate and up": (((1, 12), (1, 12)), 0),
    "q, k and v": (((2, 3, 4), (2, 1, 4), (2, 1, 4)), 1),
}


def adapters(shapes, axis, fan_in, dtype):
    rows = SLOTS * RANK
    b = tuple(normal(*shape, rows, dtype=dtype) for shape in shapes)
    return Lora(normal(len(shapes), rows, fan_in, dtype=dtype), b, rank=RANK, axis=axis)


def expected_product(lora, x, slots):
    """Token by token."""
    columns = []
    for t, slot in enumerate(slots):
        own = slice(slot * RANK, (slot + 1) * RANK)
        parts = [
            exact(b)[..., own] @ (exact(lora.a)[i, own] @ exact(x)[:, t]) * (slot >= 0) for i, b in enumerate(lora.b)
        ]
        columns.append(np.concatenate(parts, axis=lora.axis))
    return np.stack(columns, axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("slots", [(1,), (0, 2, -1, 2, 0, 1, -1)])
def test_each_token_has_the_product_of_its_own(parts, slots, dtype):
    shapes, axis = PARTS[parts]
    lora = adapters(shapes, axis, 32, dtype)
    x = normal(32, len(slots), dtype=dtype)
    out = expected_product(lora, x, slots)
    w = Dense(normal(*out.shape[:-1], 32, dtype=dtype), normal(*out.shape[:-1], dtype=dtype))
    found = jax.jit(linear)(replace(w, lora=replace(lora, slots=jnp.array(slots, jnp.int32))), x)
    wanted = np.einsum("...i,it->...t", exact(w.weight), exact(x)) + exact(w.bias)[..., None] + out
    assert found.dtype == x.dtype and found.shape == wanted.shape
    # B's operand, both products and the result are rounded once each
    tolerance = 1e-4 if dtype == "float32" else 2**-8 * (np.abs(out).max() + np.abs(wanted).max())
    np.testing.assert_allclose(exact(found), wanted, atol=tolerance)
    # whoever has none gets what there is without adapters, to the bit
    plain = jax.jit(linear)(w, x)
    none = np.array(slots) < 0
    np.testing.assert_array_equal(exact(found)[..., none], exact(plain)[..., none])


def test_a_quantised_matrix_has_them_too():
    values = np.random.default_rng(1).integers(-127, 128, (32, 12)).astype(np.int8)
    scale = np.linspace(0.01, 0.02, 12, dtype=np.float32)
    w = Dense(Quantized(jnp.asarray(values), jnp.asarray(scale), packing=Packing("int8")))
    lora, x, slots = adapters(((12,),), 0, 32, "float32"), normal(32, 3), (2, -1, 0)
    found = jax.jit(linear)(replace(w, lora=replace(lora, slots=jnp.array(slots, jnp.int32))), x)
    wanted = (values.astype(np.float64) * scale).T @ exact(x) + expected_product(lora, x, slots)
    np.testing.assert_allclose(exact(found), wanted, rtol=1e-4, atol=1e-3)
