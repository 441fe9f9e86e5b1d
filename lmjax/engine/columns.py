"""Between the core's data and the channel's records: whole columns become bytes, rows are never looked at."""

from __future__ import annotations

import numpy as np

from lmjax.core.output import FinishedEvent, LogprobOutput, PromptLogprobOutput, StartedEvent, StepOutput
from lmjax.core.request import NewRequest
from lmjax.core.stats import SchedulerStats
from lmjax.engine.records import (
    AddRequest,
    Finished,
    LogprobColumns,
    PromptLogprobColumns,
    Started,
    StepRecord,
)
from lmjax.protocol import EngineStats


def new_request(message: AddRequest) -> NewRequest:
    return NewRequest(
        handle=message.handle,
        prompt=np.frombuffer(message.prompt, "<i4"),
        params=message.params,
        stop_ids=message.stop_ids,
        bad_words_ids=message.bad_words_ids,
        priority=message.priority,
        cache_salt=message.cache_salt,
        arrival=message.arrival,
    )


def step_record(output: StepOutput | None) -> StepRecord | None:
    """None if there is nothing to tell."""
    if output is None:
        return None
    if not (len(output.handles) or output.started or output.finished or output.prompt_logprobs):
        return None
    return StepRecord(
        handles=_bytes(output.handles, "<i8"),
        token_ids=_bytes(output.token_ids, "<i4"),
        logprobs=None if output.logprobs is None else _logprobs(output.logprobs),
        prompt_logprobs=[_prompt_logprobs(entry) for entry in output.prompt_logprobs],
        started=[_started(event) for event in output.started],
        finished=[_finished(event) for event in output.finished],
    )


def engine_stats(core: SchedulerStats, device: dict[str, float], host_seconds: float) -> EngineStats:
    return EngineStats(
        num_running=core.num_running,
        num_waiting=core.num_waiting,
        kv_usage=core.kv_usage,
        steps=core.steps,
        preemptions=core.preemptions,
        prefix_queries=core.prefix_queries,
        prefix_hits=core.prefix_hits,
        prompt_tokens=core.prompt_tokens,
        generation_tokens=core.generation_tokens,
        scheduled_tokens=core.scheduled_tokens,
        padded_tokens=int(device.get("padded_tokens_total", 0)),
        compiles=int(device.get("compiles_total", 0)),
        step_host_seconds=host_seconds,
        step_device_seconds=float(device.get("device_seconds", 0.0)),
        iteration_tokens=core.iteration_tokens,
    )


def _bytes(array: np.ndarray, dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _logprobs(output: LogprobOutput) -> LogprobColumns:
    return LogprobColumns(
        rows=_bytes(output.rows, "<i4"),
        logprobs=_bytes(output.logprobs, "<f4"),
        ranks=_bytes(output.ranks, "<i4"),
        k=output.k,
        top_ids=_bytes(output.top_ids, "<i4"),
        top_logprobs=_bytes(output.top_logprobs, "<f4"),
    )


def _prompt_logprobs(output: PromptLogprobOutput) -> PromptLogprobColumns:
    return PromptLogprobColumns(
        handle=output.handle,
        first=output.first,
        logprobs=_bytes(output.logprobs, "<f4"),
        ranks=_bytes(output.ranks, "<i4"),
        k=output.k,
        top_ids=_bytes(output.top_ids, "<i4"),
        top_logprobs=_bytes(output.top_logprobs, "<f4"),
    )


def _started(event: StartedEvent) -> Started:
    return Started(event.handle, event.num_cached_tokens, event.scheduled)


def _finished(event: FinishedEvent) -> Finished:
    return Finished(event.handle, event.reason, event.stop_reason, event.message, event.queue_full)
