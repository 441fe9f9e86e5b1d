"""What one step has for the front end. Fields mirror the record that crosses to it, so nothing is converted there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lmjax.core.plan import row_width


class Started(NamedTuple):
    """A request got its first slot. Given once for each handle. ``scheduled``: seconds of time.monotonic()."""

    handle: int
    num_cached_tokens: int
    scheduled: float


class Finished(NamedTuple):
    """``reason``: stop, length, abort or error. ``stop_reason``: the token that stopped the request."""

    handle: int
    reason: str
    stop_reason: int | None = None
    message: str | None = None
    queue_full: bool = False


class PromptRows(NamedTuple):
    """Of the prompt tokens at positions ``first`` .. ``first + n - 1``. Entropies come if they are wanted.

    Of a request that pools: ``rows`` is float32 [1, width], the sum of the hidden states of some of its tokens in this
    step; ``first`` is the first of them, so sums that came before are void where that is the request's first.
    """

    handle: int
    first: int
    width: int
    rows: bytes  # int32 [n, width], token rows (see core.plan.row_width); a memoryview until it was sent
    entropies: bytes = b""  # float32 [n]


class StepOutput(NamedTuple):
    """Buffers, not arrays: they are sent as they are."""

    handles: memoryview  # int64 [n]
    width: int  # columns of a row
    rows: memoryview  # int32 [n, width], token rows (see core.plan.row_width)
    prompt_rows: list[PromptRows]
    started: list[Started]
    finished: list[Finished]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """handles [n] and token rows [n, width]."""
        return np.asarray(self.handles), np.asarray(self.rows).reshape(-1, self.width)


def cut_rows(rows: np.ndarray, k: int | None) -> np.ndarray:
    """Token rows with the ``k`` best of their pairs, C-contiguous."""
    width = row_width(k)
    return rows if width == rows.shape[1] else np.ascontiguousarray(rows[:, :width])
