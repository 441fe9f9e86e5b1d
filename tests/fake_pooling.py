"""The hidden states of ``tests.fakes.FakeExecutor``."""

from __future__ import annotations

import numpy as np

from lmjax.core.plan import POOLED, PromptLogprobs, StepPlan


def pooled_rows(plan: StepPlan, row: int, targets: np.ndarray, ids: np.ndarray, weights: int) -> list[PromptLogprobs]:
    """Of a plan's row: a "hidden state" is (1, the position, the token, the weights)."""
    marked = np.flatnonzero(targets == POOLED)
    if not len(marked):
        return []
    positions = int(plan.starts[row]) + marked
    sums = np.array([[len(marked), positions.sum(), ids[marked].sum(), weights * len(marked)]], np.float32)
    first, key = int(positions[0]), int(plan.keys[row])
    return [PromptLogprobs(int(plan.handles[row]), first, sums, pooled=len(marked), key=key)]
