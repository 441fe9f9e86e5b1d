"""What one step has for the front end, in columns. Fields mirror the records that cross to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lmjax.core.plan import PromptLogprobs, StepResult
from lmjax.types import FinishReason


@dataclass(slots=True)
class StartedEvent:
    """A request got its first slot. Given once for each handle. ``scheduled``: seconds of time.monotonic()."""

    handle: int
    num_cached_tokens: int
    scheduled: float


@dataclass(slots=True)
class FinishedEvent:
    """``stop_reason``: the stop token if it is one of ``stop_token_ids``, None for eos."""

    handle: int
    reason: FinishReason
    stop_reason: int | None = None
    message: str | None = None
    queue_full: bool = False


@dataclass(slots=True)
class LogprobOutput:
    """Of those rows of the step's output that asked; ``k``: most top entries that one of them asked for."""

    rows: np.ndarray  # int32 [n], indices into StepOutput.handles
    logprobs: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int32 [n], from 1
    k: int
    top_ids: np.ndarray  # int32 [n, k], best first
    top_logprobs: np.ndarray  # float32 [n, k]


@dataclass(slots=True)
class PromptLogprobOutput:
    """Of the prompt tokens at positions ``first`` .. ``first + n - 1``."""

    handle: int
    first: int
    logprobs: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int32 [n]
    k: int
    top_ids: np.ndarray  # int32 [n, k]
    top_logprobs: np.ndarray  # float32 [n, k]


@dataclass(slots=True)
class StepOutput:
    handles: np.ndarray  # int64 [n]
    token_ids: np.ndarray  # int32 [n]
    logprobs: LogprobOutput | None = None
    prompt_logprobs: list[PromptLogprobOutput] = field(default_factory=list)
    started: list[StartedEvent] = field(default_factory=list)
    finished: list[FinishedEvent] = field(default_factory=list)


def reduce_logprobs(result: StepResult, emitted: np.ndarray, asked: np.ndarray) -> LogprobOutput | None:
    """Keeps what was asked for (views of the result where that is its first rows).

    ``emitted``: int [n], ascending, the result's rows that are given out. ``asked``: int [n], top entries asked for,
    -1: none.
    """
    if result.logprobs is None or not len(emitted):
        return None
    assert result.ranks is not None and result.top_ids is not None and result.top_logprobs is not None
    rows = (asked >= 0).nonzero()[0]
    if not len(rows):
        return None
    k = int(np.maximum.reduce(asked))
    # emitted is ascending; the result's first rows need no copy
    first_rows = emitted[rows[-1]] == len(rows) - 1
    source: np.ndarray | slice = slice(len(rows)) if first_rows else emitted[rows]
    return LogprobOutput(
        rows.astype(np.int32),
        result.logprobs[source],
        result.ranks[source],
        k,
        result.top_ids[source][:, :k],
        result.top_logprobs[source][:, :k],
    )


def reduce_prompt_logprobs(entry: PromptLogprobs, k: int) -> PromptLogprobOutput:
    return PromptLogprobOutput(
        entry.handle, entry.first, entry.logprobs, entry.ranks, k, entry.top_ids[:, :k], entry.top_logprobs[:, :k]
    )
