"""All-pairs covers: every value of every axis meets every value of every other axis at least once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def all_pairs(allowed: Callable[[Case], bool] | None = None, /, **axes: Sequence[Any]) -> list[Case]:
    """A short list of cases, always the same, that together hold each pair of values which some allowed case holds.

    Greedy over the whole matrix: at each turn the case with the most pairs not yet covered. For matrices up to some
    ten thousand cases.
    """
    names = list(axes)
    index = [range(len(axes[name])) for name in names]

    def case(choice: Sequence[int]) -> Case:
        return {name: axes[name][i] for name, i in zip(names, choice, strict=True)}

    choices = [c for c in product(*index) if allowed is None or allowed(case(c))]
    pairs = {c: {(a, b, c[a], c[b]) for a, b in combinations(range(len(names)), 2)} for c in choices}
    missing = set().union(*pairs.values())
    cover = []
    while missing:
        best = max(choices, key=lambda c: len(pairs[c] & missing))
        missing -= pairs[best]
        cover.append(case(best))
    return cover


def every(allowed: Callable[[Case], bool] | None = None, /, **axes: Sequence[Any]) -> list[Case]:
    """The whole matrix."""
    cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [c for c in cases if allowed is None or allowed(c)]


def name(case: Case) -> str:
    """A test id."""
    return "-".join(f"{key}={getattr(value, '__name__', value)}" for key, value in case.items())
