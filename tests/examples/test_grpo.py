"""examples/grpo.py learns what is to be learnt, and nothing where there is nothing."""

from __future__ import annotations

import jax
import pytest

from examples import grpo


@pytest.fixture(autouse=True)
def _optax_promotes_types():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_success_rises_and_the_gap_is_nothing():
    result = grpo.main(["--steps", "30"])
    assert 0.05 <= result.before <= 0.15
    assert result.after >= 3 * result.before
    assert result.gap == 0


def test_rewards_of_other_answers_teach_nothing():
    result = grpo.main(["--steps", "30", "--shuffle-rewards"])
    assert result.after < 2 * result.before
    assert result.gap == 0
