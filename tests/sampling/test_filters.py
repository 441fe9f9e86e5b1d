"""Thresholds against a float64 sort; the candidates, the bisection and the form without branches against each other.

``num_candidates`` None: without branches."""

import functools

import jax
import numpy as np
import pytest

from lmjax.sampling.filters import thresholds
from lmjax.sampling.params import encode_params
from lmjax.sampling.rows import unpack_rows
from tests.sampling.reference import kept_tokens, make_load

VOCAB = 700


@functools.partial(jax.jit, static_argnums=2)
def least(scores, params, num):
    branches = {"branches": False} if num is None else {"num_candidates": num}
    return thresholds(scores, scores.max(axis=0), unpack_rows(params), **branches)


def kept(logits, loads, num):
    """At 64 rows, the other ones greedy: few shapes to compile."""
    more = ((0, 0), (0, 64 - len(loads)))
    params = np.pad(np.stack([encode_params(x) for x in loads]), more[::-1])
    return logits >= np.asarray(least(np.pad(logits, more), params, num))[: len(loads)]


def random_loads(rng, count):
    choose = lambda off, values: off if rng.random() < 0.3 else values[rng.integers(len(values))]  # noqa: E731
    return [
        make_load(
            temperature=float(rng.choice([0.05, 0.7, 1.0, 3.0])),
            top_k=choose(0, [1, 2, 15, 16, 17, 100, 699, 700, 5000]),
            top_p=choose(1.0, [1e-9, 0.1, 0.5, 0.9, 0.999]),
            min_p=choose(0.0, [1e-4, 0.05, 0.9, 1.0]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_candidates", [1, 16, 256, 4096, None])
@pytest.mark.parametrize("kind", ["normal", "flat", "masked"])
def test_kept_tokens(kind, num_candidates):
    rng = np.random.default_rng(len(kind))
    logits = rng.normal(0, 0.2 if kind == "flat" else 3.0, (VOCAB, 64)).astype(np.float32)
    if kind == "masked":
        logits[rng.random(logits.shape) < 0.97] = -np.inf
        logits[5] = 0.0
    loads = random_loads(rng, 64)
    got = kept(logits, loads, num_candidates)
    compared = 0
    for i, load in enumerate(loads):
        want, margin = kept_tokens(logits[:, i].astype(np.float64), load.params)
        if margin > 1e-5:
            finite = logits[:, i] > -np.inf
            np.testing.assert_array_equal(got[finite, i], want[finite], err_msg=str(load.params))
            compared += 1
    assert compared > 55


@pytest.mark.parametrize("num_candidates", [2, 8, 256, None])
def test_ties_of_the_threshold_are_all_kept(num_candidates):
    logits = np.full((VOCAB, 4), -2.0, np.float32)
    logits[[3, 300, 699]] = 5.0
    logits[[4, 17, 400, 600]] = 4.0
    loads = [make_load(top_k=2), make_load(top_k=5), make_load(top_k=3), make_load(top_p=0.4)]
    got = kept(logits, loads, num_candidates)
    best, second = {3, 300, 699}, {4, 17, 400, 600}
    for column, want in enumerate([best, best | second, best, best]):
        assert set(np.flatnonzero(got[:, column]).tolist()) == want


def test_top_p_counts_the_mass_after_top_k():
    """Probabilities 0.4, 0.3, 0.2, 0.1: top_k 2 leaves 4/7 and 3/7, and 0.55 of that is the first alone."""
    logits = np.full((VOCAB, 2), -np.inf, np.float32)
    logits[:4] = np.log(np.array([0.4, 0.3, 0.2, 0.1]))[:, None]
    loads = [make_load(top_k=2, top_p=0.55), make_load(top_p=0.55)]
    for num in (1, 16, None):
        assert kept(logits, loads, num).sum(axis=0).tolist() == [1, 2]


@pytest.mark.parametrize("num_candidates", [16, None])
def test_at_least_one_token_stays(num_candidates):
    logits = np.random.default_rng(0).normal(size=(VOCAB, 3)).astype(np.float32)
    loads = [make_load(top_p=1e-300), make_load(min_p=1.0), make_load(top_k=1, top_p=1e-9, min_p=1.0, temperature=1e6)]
    got = kept(logits, loads, num_candidates)
    np.testing.assert_array_equal(got.argmax(axis=0), logits.argmax(axis=0))
    assert got.sum(axis=0).tolist() == [1, 1, 1]


def test_a_neighbour_in_need_of_bisection_changes_nothing():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (VOCAB, 3)).astype(np.float32)
    easy = [make_load(top_k=7, top_p=0.9), make_load(top_p=0.3), make_load(top_k=16)]
    alone = kept(logits, easy, 16)
    hard = kept(logits, [easy[0], make_load(top_k=300, top_p=0.999, temperature=5.0), easy[2]], 16)
    np.testing.assert_array_equal(alone[:, [0, 2]], hard[:, [0, 2]])
    assert hard[:, 1].sum() > 200
