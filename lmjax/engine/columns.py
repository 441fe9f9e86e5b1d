"""Between the core's data and the channel's records: whole columns become bytes, rows are never looked at.

The columns have the dtypes that the records name already, and every platform of JAX is little-endian.
"""

from __future__ import annotations

import numpy as np

from lmjax.core.output import LogprobOutput, PromptLogprobOutput, StepOutput
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
        output.handles.tobytes(),
        output.token_ids.tobytes(),
        None if output.logprobs is None else _logprobs(output.logprobs),
        [_prompt_logprobs(entry) for entry in output.prompt_logprobs],
        [Started(e.handle, e.num_cached_tokens, e.scheduled) for e in output.started],
        [Finished(e.handle, e.reason, e.stop_reason, e.message, e.queue_full) for e in output.finished],
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


def _logprobs(output: LogprobOutput) -> LogprobColumns:
    return LogprobColumns(
        output.rows.tobytes(),
        output.logprobs.tobytes(),
        output.ranks.tobytes(),
        output.k,
        output.top_ids.tobytes(),
        output.top_logprobs.tobytes(),
    )


def _prompt_logprobs(output: PromptLogprobOutput) -> PromptLogprobColumns:
    return PromptLogprobColumns(
        handle=output.handle,
        first=output.first,
        logprobs=output.logprobs.tobytes(),
        ranks=output.ranks.tobytes(),
        k=output.k,
        top_ids=output.top_ids.tobytes(),
        top_logprobs=output.top_logprobs.tobytes(),
    )
