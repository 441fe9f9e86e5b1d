"""Log-probabilities of families with mechanisms that the plain implementation of ``plain.py`` has not: values of
transformers, and gradients against differences of those values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax import functional
from lmjax.models.params import map_named, named_leaves
from tests import tiny
from tests.models.driver import COMPILER_OPTIONS, params_from
from tests.models.test_decoder import GOLDENS

compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
# soft caps; QK-norm over all heads, two ropes; layers without rope; ALiBi; sinks, experts with biases; latent KV and
# groups of experts (in V2's tiny model a small step makes a token choose others, which no gradient tells)
NAMES = ["gemma2", "olmo3", "cohere2", "mpt", "gpt_oss", "deepseek_v3"]
SLOW = ("olmo3", "cohere2", "mpt", "gpt_oss")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in NAMES])
def test_values_and_gradients(name):
    spec = functional.spec_from_hf(tiny.CASES[name].config, None)
    params = params_from(tiny.tensors(name), spec)
    ids, at = tiny.prompts(name)[0], tiny.stored_positions(name)[0][:-1]
    tokens, rng = jnp.asarray(ids)[None], np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(1, len(ids) - 1)), jnp.float32)

    def loss(params):
        found = functional.logprobs(params, tokens, spec=spec)
        return (found * weights).sum(), found

    (_, found), gradient = compiled(jax.value_and_grad(loss, has_aux=True))(params)
    logits = GOLDENS[f"{name}/0"][:-1].astype(np.float64)
    wanted = logits[np.arange(len(at)), ids[at + 1]] - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(np.asarray(found)[0, at], wanted, rtol=1e-4, atol=1e-4)

    # Along a kind of parameter's own gradient the slope is its norm. Central differences, of a step that is large
    # against rounding.
    value = compiled(lambda params: loss(params)[0])
    leaves = named_leaves(gradient)
    for kind in dict.fromkeys(_kind(name) for name in leaves):
        norm = np.sqrt(sum(float(jnp.vdot(g, g)) for name, g in leaves.items() if _kind(name) == kind))
        if kind == "mlp.choice_bias":  # a choice has no gradient
            assert norm == 0
            continue
        assert norm > 0, kind
        step = 2e-2 / norm
        ends = [float(value(_moved(params, leaves, kind, sign * step / norm))) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm, rel=0.03), kind


def _moved(params, direction, kind, by):
    return map_named(lambda name, p: p + by * direction[name] if _kind(name) == kind else p, params)


def _kind(leaf: str) -> str:
    return leaf.split(".", 2)[-1]
