import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.sampling.chunks import best_token, first_above, to_chunks, top_values

top_values_jit = jax.jit(top_values, static_argnums=1)


def tied(rng, vocab, rows):
    """Few distinct values, so that ties fall inside chunks, across them and at every cut."""
    return rng.integers(-3, 4, (vocab, rows)).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 5, 16, 17, 200, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_top_values_equal_a_stable_sort(vocab, ties):
    rng = np.random.default_rng(vocab)
    x = tied(rng, vocab, 6) if ties else rng.normal(size=(vocab, 6)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = -np.inf
    for k in {0, 1, min(20, vocab), vocab}:
        values, ids = top_values_jit(jnp.asarray(x), k)
        order = np.argsort(-x, axis=0, kind="stable")[:k].T
        # Where -inf ties with the filling, the filling has the larger ids: still the stable order.
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_array_equal(values, np.take_along_axis(x.T, order, axis=1))


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 700])
def test_best_token_is_the_first_maximum(vocab):
    rng = np.random.default_rng(vocab)
    for x in (tied(rng, vocab, 9), rng.normal(size=(vocab, 9)).astype(np.float32), np.full((vocab, 2), -np.inf)):
        best, token = best_token(to_chunks(jnp.asarray(x, jnp.float32), 128))
        np.testing.assert_array_equal(token, x.argmax(axis=0))
        np.testing.assert_array_equal(best, x.max(axis=0))


def test_first_above_never_takes_an_entry_without_weight():
    weights = jnp.asarray([[0.0, 2.0, 0.0, 1.0, 0.0]] * 5 + [[0.0] * 5])
    # The last but one is a scan that is off by rounding: it rises where the weight is 0.
    cumulative = jnp.asarray([[0.0, 2, 2, 3, 3]] * 4 + [[0.5, 2, 2.1, 3, 3.1]] + [[0.0] * 5])
    target = jnp.asarray([0.0, 1.9, 2.0, 3.0, 2.05, 0.0])
    np.testing.assert_array_equal(first_above(cumulative, weights, target, axis=1), [1, 1, 3, 3, 3, -1])
    np.testing.assert_array_equal(first_above(cumulative.T, weights.T, target, axis=0), [1, 1, 3, 3, 3, -1])
