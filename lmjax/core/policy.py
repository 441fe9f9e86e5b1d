"""In which order requests wait, and which one is preempted."""

from __future__ import annotations

from collections.abc import Iterable

from lmjax.core.request import Request

Rank = tuple[int, float, int]


def rank(policy: str, priority: int, arrival: float, sequence: int) -> Rank:
    """The sort key of a request; lower goes first. ``sequence``: the order of the calls of ``add``.

    A preempted request keeps its rank. It was admitted before everything of its priority that still waits, so it
    comes back to the front of them.
    """
    return (priority if policy == "priority" else 0, arrival, sequence)


def victim(running: Iterable[Request]) -> Request:
    """Lowest priority (highest value) first, then the latest arrival."""
    return max(running, key=lambda request: request.rank)
