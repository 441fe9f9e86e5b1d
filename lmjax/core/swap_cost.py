"""What moving blocks between the tiers costs, and what computing their tokens again would: learned from the steps."""

from __future__ import annotations

import numpy as np

from lmjax.core.plan import HostTierInfo, StepPlan

# parts of a step's time: the step itself, its tokens, the earlier tokens they read, transfers out, transfers in
_STEP, _TOKENS, _PAIRS, _OUT, _IN = range(5)
# what the starting values count, in steps: transfers were measured, and are a small part of a step's time
_PRIOR = np.array([0.5, 0.5, 0.5, 3.0, 3.0])
_MEMORY = 0.98  # of the steps before, what is left after one more
_MOST_WRONG = 100.0  # no part costs more than so many times its starting value, nor less than that share of it


class SwapCosts:
    """A regression of the steps' seconds on what was in them, with the starting values as its prior.

    Errors are relative to a step's length, so short and long steps count the same. Steps of decode rows alone are not
    looked at. It is solved when a cost is asked for.
    """

    def __init__(self, info: HostTierInfo):
        self.batch = info.batch
        parts = (info.step_seconds, info.token_seconds, info.pair_seconds, info.out_seconds, info.in_seconds)
        self._start = np.maximum(np.array(parts, np.float64), 1e-12)
        self._squares = np.zeros((5, 5))
        self._sums = np.zeros(5)
        self._weight = 0.0  # of the steps in them
        self._costs: np.ndarray | None = self._start

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0.0:
            return
        starts, lengths = plan.starts.astype(np.float64), plan.lengths.astype(np.float64)
        pairs = float((lengths * (starts + lengths / 2)).sum())
        out, back = self.transfers(len(plan.swaps_out)), self.transfers(len(plan.swaps_in))
        row = np.array([1.0, plan.num_tokens, pairs, out, back]) * self._start / seconds
        self._squares = _MEMORY * self._squares + np.outer(row, row)
        self._sums = _MEMORY * self._sums + row
        self._weight = _MEMORY * self._weight + 1.0
        self._costs = None

    def _solved(self) -> np.ndarray:
        """Seconds of each part."""
        if self._costs is None:
            prior = _PRIOR * self._squares.diagonal() / self._weight + 1e-12  # never nothing: a part may be unseen
            factors = np.linalg.solve(self._squares + np.diag(prior), self._sums + prior)
            self._costs = self._start * np.clip(factors, 1 / _MOST_WRONG, _MOST_WRONG)
        return self._costs

    def transfers(self, num_blocks: int) -> int:
        return -(-num_blocks // self.batch)

    def recompute(self, start: int, end: int) -> float:
        """Seconds that the tokens at positions ``start`` .. ``end`` - 1 take within steps that run anyway."""
        costs = self._solved()
        return float((end - start) * costs[_TOKENS] + (end * end - start * start) / 2 * costs[_PAIRS])

    def swap_out(self, num_blocks: int) -> float:
        return float(self.transfers(num_blocks) * self._solved()[_OUT])

    def swap_in(self, num_blocks: int) -> float:
        return float(self.transfers(num_blocks) * self._solved()[_IN])
