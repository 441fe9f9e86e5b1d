"""Scheduling for encoders: each request is one sequence, computed whole in one step, in the order of its rank.

Has the methods of ``core.scheduler.Scheduler`` that the engine calls. Nothing is kept between steps, so there are no
blocks, no slots and no preemption.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lmjax.config import SchedulerConfig
from lmjax.core.output import Finished, PromptRows, Started, StepOutput
from lmjax.core.plan import ExecutorInfo, WholePlan
from lmjax.core.policy import Rank, rank
from lmjax.core.request import NewRequest
from lmjax.core.stats import SchedulerStats

_MOST_ITERATIONS = 4096
_NO_HANDLES, _NO_ROWS = np.zeros(0, np.int64).data, np.zeros((0, 1), np.int32).data


class WholeScheduler:
    """``add`` and ``abort`` at any time; then ``schedule`` -> run the plan -> ``update``."""

    def __init__(self, config: SchedulerConfig, info: ExecutorInfo):
        self.config, self.info = config, info
        self._budget = info.token_buckets[-1]
        self._waiting: dict[int, NewRequest] = {}
        self._running: dict[int, NewRequest] = {}
        self._heap: list[tuple[Rank, int]] = []  # with entries of requests that were aborted
        self._sequence = self._steps = 0
        self._waiting_tokens = 0
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._stats = SchedulerStats()
        self._iteration_tokens: deque[int] = deque(maxlen=_MOST_ITERATIONS)

    def add(self, new: NewRequest) -> None:
        message, full = self._why_never(new), self._why_full(new)
        if message or full:
            self._finished.append(Finished(new.handle, "error", message=message or full, queue_full=message is None))
            return
        key = rank(self.config.scheduling_policy, new.priority, new.arrival, self._sequence)
        self._sequence += 1
        self._waiting[new.handle] = new
        self._waiting_tokens += len(new.prompt)
        heapq.heappush(self._heap, (key, new.handle))

    def _why_never(self, new: NewRequest) -> str | None:
        length, info = len(new.prompt), self.info
        if not new.pooling:
            return "the model is an encoder: it generates nothing"
        if not 1 <= length <= info.max_model_len:
            return f"the text has {length} tokens, must have 1 to {info.max_model_len}"
        if np.maximum.reduce(new.prompt.view(np.uint32)) >= info.vocab_size:  # so negative ids are large
            return f"a token id is outside the vocabulary of {info.vocab_size}"
        return None

    def _why_full(self, new: NewRequest) -> str | None:
        config = self.config
        if config.max_num_queued_reqs is not None and len(self._waiting) >= max(config.max_num_queued_reqs, 1):
            return f"the queue is full: {len(self._waiting)} requests wait"
        most = config.max_num_queued_tokens
        if most is not None and self._waiting and self._waiting_tokens + len(new.prompt) > most:
            return f"the queue is full: {self._waiting_tokens} tokens wait, at most {most} may"
        return None

    def abort(self, handles: Iterable[int]) -> None:
        """What runs already is computed to its end, and dropped."""
        for handle in handles:
            waiting = self._waiting.pop(handle, None)
            if waiting is not None:
                self._waiting_tokens -= len(waiting.prompt)
            if waiting is not None or self._running.pop(handle, None) is not None:
                self._finished.append(Finished(handle, "abort"))

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._started or self._finished)

    def schedule(self) -> WholePlan | None:
        """The sequences that are next, as many as fit; None if nothing waits."""
        began, left = time.perf_counter(), self._budget
        chosen: list[NewRequest] = []
        while self._heap and len(chosen) < self.info.max_num_seqs:
            request = self._waiting.get(self._heap[0][1])
            if request is not None and len(request.prompt) > left:
                break
            heapq.heappop(self._heap)
            if request is not None:
                chosen.append(request)
                left -= len(request.prompt)
                del self._waiting[request.handle]
        if not chosen:
            return None
        now, total = time.monotonic(), self._budget - left
        for request in chosen:
            self._running[request.handle] = request
            self._started.append(Started(request.handle, 0, now))
        self._waiting_tokens -= total
        self._steps += 1
        self._stats.steps += 1
        self._stats.prompt_tokens += total
        self._stats.scheduled_tokens += total
        self._iteration_tokens.append(total)
        self._stats.plan_seconds += time.perf_counter() - began
        return WholePlan(
            step_id=self._steps,
            handles=np.array([request.handle for request in chosen], np.int64),
            lengths=np.array([len(request.prompt) for request in chosen], np.int32),
            splits=np.array([request.split for request in chosen], np.int32),
            poolings=[request.pooling for request in chosen],
            token_ids=np.concatenate([request.prompt for request in chosen]),
        )

    def update(self, plan: WholePlan, sums: np.ndarray) -> StepOutput:
        """sums: float32 [rows, width]."""
        found = []
        for handle, length, pooling, row in zip(
            plan.handles.tolist(), plan.lengths.tolist(), plan.poolings, sums, strict=True
        ):
            if self._running.pop(handle, None) is not None:
                first = length - 1 if pooling == "last" else 0
                found.append(PromptRows(handle, first, len(row), np.ascontiguousarray(row).data))  # type: ignore[arg-type]
                self._finished.append(Finished(handle, "stop"))
        return self._events(found)

    def take_events(self) -> StepOutput | None:
        return self._events([]) if self._started or self._finished else None

    def _events(self, found: list[PromptRows]) -> StepOutput:
        output = StepOutput(_NO_HANDLES, 1, _NO_ROWS, found, self._started, self._finished)
        self._started, self._finished = [], []
        return output

    def new_weights(self, recompute: bool) -> None:
        """Nothing that the old ones have computed is kept."""

    def give_up_kv(self) -> None:
        """There is none."""

    def stats(self) -> SchedulerStats:
        tokens = list(self._iteration_tokens)
        self._iteration_tokens.clear()
        return replace(
            self._stats, num_running=len(self._running), num_waiting=len(self._waiting), iteration_tokens=tokens
        )

    def check_integrity(self) -> None:
        assert self._waiting_tokens == sum(len(request.prompt) for request in self._waiting.values())
        assert self._waiting.keys() <= {handle for _, handle in self._heap}
