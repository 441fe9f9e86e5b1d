"""Routers that score by sigmoid, weigh by a factor, or pick from a few groups of experts: DeepSeek's V2 and V3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

TINY = 1e-20  # as in transformers: a sum of scores that are all 0


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits become the picked experts and their weights. The default is a softmax and its best.

    ``groups``: the experts are so many groups one after the other, and those picked are of the ``top_groups`` best, by
    their best score or the sum of their two best. ``choice_bias``: a parameter, added to scores for the choice alone.
    ``factor``: of the weights.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    choice_bias: bool = False
    factor: float = 1.0

    @property
    def is_softmax(self) -> bool:
        """Nothing but a softmax and its best, perhaps times a factor."""
        return self.scoring == "softmax" and not self.choice_bias and self.top_groups == self.groups


def pick(
    logits: jax.Array, choice_bias: jax.Array | None, rule: Routing, top_k: int, normalise: bool
) -> tuple[jax.Array, jax.Array]:
    """logits float32 [T, E], choice_bias float32 [E] -> weights float32 [T, k] and experts int32 [T, k].

    The choice has no gradient, the weights have. Sources: DeepSeek-V2 (2024), section 2.2.2; DeepSeek-V3 (2024),
    section 2.1.2.
    """
    scores = jax.nn.softmax(logits, axis=-1) if rule.scoring == "softmax" else jax.nn.sigmoid(logits)
    choice = lax.stop_gradient(scores)
    if choice_bias is not None:
        choice = choice + lax.stop_gradient(choice_bias)[None, :]
    if rule.top_groups < rule.groups:
        choice = jnp.where(_in_best_groups(choice, rule), choice, -jnp.inf)
    _, experts = lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + jnp.float32(TINY))
    return weights * jnp.float32(rule.factor), experts


def _in_best_groups(choice: jax.Array, rule: Routing) -> jax.Array:
    """bool [T, E]."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, rule.groups, -1)
    if rule.group_score == "best":
        score = grouped.max(-1)
    else:
        score = lax.top_k(grouped, 2)[0].sum(-1)
    _, best = lax.top_k(score, rule.top_groups)  # [T, groups that are taken]
    taken = (best[:, :, None] == jnp.arange(rule.groups, dtype=best.dtype)[None, None]).any(1)
    return jnp.repeat(taken, experts // rule.groups, axis=1)
