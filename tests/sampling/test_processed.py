"""Log-probabilities of what is drawn from, against the float64 pipeline."""

import numpy as np
import pytest

from lmjax.sampling.params import feature_level
from tests.sampling.reference import kept_tokens, make_load, processed, run
from tests.sampling.test_sampler import random_load, random_logits

TOP = 6


def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def drawn_from(logits, load):
    """float64 [V], -inf for what cannot be drawn; None where rounding may move the cut of top_p."""
    z, p = processed(logits, load), load.params
    if p.temperature == 0.0:
        return log_softmax(z)
    kept, margin = kept_tokens(z, p)
    return None if margin < 1e-4 else log_softmax(np.where(kept, z, -np.inf) / p.temperature)


def expect(out, i, wanted):
    token = int(out.token_ids[i])
    np.testing.assert_allclose(out.logprobs[i], wanted[token], atol=2e-4)
    assert out.logprobs[i] > -np.inf
    larger = (wanted > wanted[token] + 1e-4).sum(), (wanted > wanted[token] - 1e-4).sum()
    assert larger[0] + 1 <= out.ranks[i] <= larger[1] + 1
    np.testing.assert_allclose(out.top_logprobs[i], -np.sort(-wanted)[:TOP], atol=2e-4)
    np.testing.assert_allclose(wanted[out.top_ids[i]], out.top_logprobs[i], atol=2e-4)
    assert len(set(out.top_ids[i].tolist())) == TOP


@pytest.mark.parametrize("seed", range(4))
def test_equal_the_reference(seed):
    """Every mix of bias, penalties, masks, bad words, temperature and filters, at the level that the rows need."""
    rng = np.random.default_rng(100 + seed)
    loads = [random_load(rng, slot) for slot in range(32)]
    logits = random_logits(rng, 32)
    out = run(logits, loads, max_logprobs=TOP, processed_logprobs=True)
    checked = 0
    for i, load in enumerate(loads):
        wanted = drawn_from(logits[:, i], load)
        if wanted is not None:
            expect(out, i, wanted)
            checked += 1
    assert checked > 20
    raw = run(logits, loads, max_logprobs=TOP)
    np.testing.assert_array_equal(raw.token_ids, out.token_ids)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_greedy_rows_have_temperature_1_at_every_level(level):
    logits = random_logits(np.random.default_rng(level), 8)
    loads = [make_load(slot, [1], temperature=0.0, top_k=3) for slot in range(8)]
    assert feature_level(loads[0]) == 0
    out = run(logits, loads, level=level, max_logprobs=TOP, processed_logprobs=True)
    for i in range(8):
        expect(out, i, log_softmax(logits[:, i].astype(np.float64)))


def test_a_row_with_everything_masked_has_the_models_distribution():
    logits = random_logits(np.random.default_rng(3), 2)
    loads = [make_load(0, [1], allowed_token_ids=[4], bad=[[4]], top_k=2, min_p=0.1), make_load(1, [1], top_k=2)]
    out = run(logits, loads, max_logprobs=TOP, processed_logprobs=True)
    expect(out, 0, log_softmax(logits[:, 0].astype(np.float64)))
    assert (out.top_logprobs[1, 2:] == -np.inf).all()
