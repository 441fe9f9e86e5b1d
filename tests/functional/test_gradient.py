"""The gradient of ``functional.logprobs`` against a plain flax implementation, and where it may be used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax import functional
from lmjax.models.params import named_leaves
from tests import tiny
from tests.functional import plain
from tests.marks import slow
from tests.models.driver import COMPILER_OPTIONS, params_from

compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
LENGTH = 45  # more than a window, and no multiple of a block


def arguments(name, rows=3):
    spec = functional.spec_from_hf(tiny.CASES[name].config, None)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, tiny.VOCAB, (rows, LENGTH)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(rows, LENGTH - 1)), jnp.float32)  # advantages, in a trainer
    return spec, params_from(tiny.tensors(name), spec, "float32"), tokens, weights


def assert_close(found, wanted, most=1e-5):
    """Every leaf, relative to the leaf's own norm."""
    found, wanted = named_leaves(found), named_leaves(wanted)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got, want = np.asarray(found[name], np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(want) > 0, name
        assert np.linalg.norm(got - want) <= most * np.linalg.norm(want), name


@pytest.mark.parametrize(
    "name", ["llama_tied_gqa3", "qwen3_window", "qwen2_moe", *map(slow, ("llama_mha_bias", "qwen2_window", "mixtral"))]
)
def test_values_and_gradients_equal_plain_flax(name):
    spec, params, tokens, weights = arguments(name)
    config, tensors = tiny.CASES[name].config, tiny.tensors(name)
    module = plain.Decoder(config, plain.windows_of(config))

    def loss(variables):
        found = plain.token_logprobs(module.apply(variables, tokens), tokens)
        return (found * weights).sum(), found

    def mine(params):
        found = functional.logprobs(params, tokens, spec=spec)
        return (found * weights).sum(), found

    (_, wanted), gradient = compiled(jax.value_and_grad(loss, has_aux=True))(plain.to_linen(tensors))
    (_, found), ours = compiled(jax.value_and_grad(mine, has_aux=True))(params)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # the engine's layout is a reordering of the checkpoint's numbers, so a gradient is reordered in the same way
    assert_close(ours, params_from(plain.from_linen(gradient, list(tensors)), spec, "float32"))


def test_remat_padding_vmap_and_entropy_agree():
    spec, params, tokens, weights = arguments("qwen3_window")
    lengths = jnp.asarray([LENGTH, 7, 20], jnp.int32)
    inside = np.arange(1, LENGTH)[None, :] < np.asarray(lengths)[:, None]

    def loss(params, tokens, **how):
        found = functional.logprobs(params, tokens, spec=spec, **how)
        return (found * weights).sum(), found

    padded = compiled(jax.value_and_grad(lambda p: loss(p, tokens, lengths=lengths), has_aux=True))
    (_, found), gradient = padded(params)
    assert (np.asarray(found)[~inside] == 0).all() and (np.asarray(found)[inside] < 0).all()
    other = jnp.where(
        jnp.arange(LENGTH)[None, :] < lengths[:, None], tokens, 95 - tokens
    )  # what lies behind must not matter
    remat = compiled(jax.value_and_grad(lambda p: loss(p, other, lengths=lengths, remat=True), has_aux=True))
    (_, again), same = remat(params)
    np.testing.assert_allclose(again, found, atol=1e-6)
    assert_close(same, gradient)

    def one(tokens):
        return functional.scores(params, tokens[None], spec=spec)

    scores = compiled(jax.vmap(one))(tokens)
    np.testing.assert_allclose(np.asarray(scores.logprobs[:, 0])[inside], np.asarray(found)[inside], atol=1e-5)
    logits = functional.prefill(params, tokens[:1], functional.make_cache(spec, 1, LENGTH), spec=spec)[0]
    p = np.exp(np.asarray(jax.nn.log_softmax(logits[0]), np.float64))
    more = jnp.concatenate([tokens[:1], tokens[:1, :1]], axis=1)
    last = functional.scores(params, more, spec=spec).entropies[0, -1]
    assert float(last) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)


def test_bad_tokens_are_refused():
    spec, params, *_ = arguments("qwen3")
    with pytest.raises(ValueError, match=r"tokens: got int32\[5\], must be integers \[B, n\]"):
        functional.logprobs(params, jnp.zeros(5, jnp.int32), spec=spec)
    with pytest.raises(ValueError, match="tokens: got rows of 129, must be 2 to 128"):
        functional.logprobs(params, jnp.zeros((1, 129), jnp.int32), spec=spec)
