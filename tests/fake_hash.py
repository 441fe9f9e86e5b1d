"""Hashes of what a row of the fake device sees (``tests/fakes.py``)."""

from __future__ import annotations

import numpy as np

_A, _B, _C = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(31))) * _B
    x = (x ^ (x >> np.uint64(29))) * _C
    return x ^ (x >> np.uint64(32))


def hash_of(tokens: np.ndarray, positions: np.ndarray, weights: np.ndarray | int = 0) -> int:
    """Of a set of (token, position, version of the weights that computed it)."""
    pairs = tokens.astype(np.uint64) * _A + positions.astype(np.uint64) * _C + np.uint64(1)
    pairs += np.atleast_1d(weights).astype(np.uint64) * _B
    return int(_mix(pairs).sum(dtype=np.uint64))


def hash_of_context(tokens: np.ndarray, first: int, weights: np.ndarray | int, group: int = 0) -> int:
    """What a row sees in a group: ``tokens`` at positions from ``first`` on, computed by ``weights``."""
    positions = np.arange(first, first + len(tokens))
    return draw(hash_of(np.asarray(tokens) + 1, positions + 8, weights), group)


def draw(*words: int) -> int:
    """``_mix`` of one word after the other, in Python's integers: numpy takes ten times as long for a single one."""
    a, b, c, state = int(_A), int(_B), int(_C), 0
    for word in words:
        state = (state + word * a + 7) % 2**64
        state = (state ^ (state >> 31)) * b % 2**64
        state = (state ^ (state >> 29)) * c % 2**64
        state ^= state >> 32
    return state
