import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.sampling.logprobs import target_logprobs
from tests.sampling.reference import make_load, run

logprobs_jit = jax.jit(target_logprobs, static_argnums=2)


def reference(logits):
    x = logits.astype(np.float64)
    x = x - x.max(axis=0)
    return x - np.log(np.exp(x).sum(axis=0))


@pytest.mark.parametrize(("vocab", "rows", "k"), [(200, 7, 20), (200, 1, 0), (1000, 3, 5), (8, 4, 20)])
def test_target_logprobs(vocab, rows, k):
    rng = np.random.default_rng(0)
    logits = (rng.normal(0, 5, (vocab, rows)) + 300).astype(np.float32)
    logits[1::7] = logits[0::7][: len(logits[1::7])]  # ties
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    got = logprobs_jit(jnp.asarray(logits), jnp.asarray(targets), k)
    want = reference(logits)
    col = np.arange(rows)
    np.testing.assert_allclose(got.logprobs, want[targets, col], atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(got.ranks, 1 + (logits > logits[targets, col]).sum(axis=0))
    assert got.top_ids.shape == got.top_logprobs.shape == (rows, k)
    real = min(k, vocab)
    order = np.argsort(-logits, axis=0, kind="stable")[:real].T
    np.testing.assert_array_equal(got.top_ids[:, :real], order)
    np.testing.assert_allclose(got.top_logprobs[:, :real], np.take_along_axis(want.T, order, 1), atol=2e-5, rtol=1e-5)
    assert (got.top_ids[:, real:] == -1).all() and np.isneginf(got.top_logprobs[:, real:]).all()


def test_padding_targets_do_no_harm():
    logits = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    got = logprobs_jit(jnp.asarray(logits), jnp.asarray([-1, 4, 1000], jnp.int32), 2)
    np.testing.assert_allclose(got.logprobs[1], reference(logits)[4, 1], rtol=1e-5)
    assert np.isfinite(got.logprobs).all()


def test_sampled_logprobs_are_raw():
    """Of the model's own distribution, whatever temperature, filters, bias and masks did to the draw."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (200, 4)).astype(np.float32)
    loads = [
        make_load(0, [1, 2], temperature=0.0),
        make_load(1, [1, 2], temperature=0.3, top_k=5),
        make_load(2, [1, 2], allowed_token_ids=[int(logits[:, 2].argmin())]),
        make_load(3, [1, 2], temperature=0.0, logit_bias={9: 100.0}),
    ]
    out = run(logits, loads, max_logprobs=6)
    want, col = reference(logits), np.arange(4)
    assert out.token_ids[2] == logits[:, 2].argmin() and out.ranks[2] == 200 and out.token_ids[3] == 9
    assert out.ranks[0] == 1 and out.top_ids[0, 0] == out.token_ids[0]
    np.testing.assert_allclose(out.logprobs, want[out.token_ids, col], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out.top_ids, np.argsort(-logits, axis=0, kind="stable")[:6].T)
    assert run(logits, loads).logprobs is None
