"""Between the core's data and the channel's records. Buffers are sent as they are, rows are never looked at.

Every platform of JAX is little-endian.
"""

from __future__ import annotations

import numpy as np

from lmjax.core.output import StepOutput
from lmjax.core.request import NewRequest
from lmjax.core.stats import SchedulerStats
from lmjax.engine.records import AddRequest, StepRecord
from lmjax.engine.validate import Checked
from lmjax.protocol import EngineStats


def new_request(message: AddRequest, adapter: int = 0) -> NewRequest:
    return NewRequest(
        handle=message.handle,
        prompt=np.frombuffer(message.prompt, "<i4"),
        params=message.params,
        stop_ids=message.stop_ids,
        bad_words_ids=message.bad_words_ids,
        priority=message.priority,
        cache_salt=message.cache_salt,
        adapter=adapter,
        arrival=message.arrival,
        after=message.after,
        entropy=message.entropy,
        pooling=message.pooling,
        split=message.split,
    )


def add_request(
    handle: int,
    checked: Checked,
    arrival: float,
    priority: int = 0,
    cache_salt: str | None = None,
    lora: str | None = None,
) -> AddRequest:
    message = AddRequest(
        handle=handle,
        prompt=np.asarray(checked.prompt, "<i4").tobytes(),
        params=checked.params,
        stop_ids=checked.stop_ids,
        bad_words_ids=checked.bad_words_ids,
        priority=priority,
        cache_salt=cache_salt,
        arrival=arrival,
        lora=lora,
    )
    sink = checked.sink
    if sink is not None:
        message.after, message.entropy = sink.after, sink.entropy
        message.pooling, message.split = sink.pooling, sink.split
    return message


def step_record(output: StepOutput | None) -> StepRecord | None:
    """None if there is nothing to tell."""
    if output is None or not (len(output.handles) or output.started or output.finished or output.prompt_rows):
        return None
    return StepRecord(*output)  # type: ignore[arg-type]  # a memoryview is encoded like bytes


def engine_stats(core: SchedulerStats, device: dict[str, float], host_seconds: float) -> EngineStats:
    """device: of ``Executor.stats``; host_seconds: of turns, without the wait in ``collect``."""
    return EngineStats(
        num_running=core.num_running,
        num_waiting=core.num_waiting,
        kv_usage=core.kv_usage,
        steps=core.steps,
        preemptions=core.preemptions,
        prefix_queries=core.prefix_queries,
        prefix_hits=core.prefix_hits,
        host_usage=core.host_usage,
        host_queries=core.host_queries,
        host_hits=core.host_hits,
        swaps_out=core.swaps_out,
        swaps_in=core.swaps_in,
        swapped_out_blocks=core.swapped_out_blocks,
        swapped_in_blocks=core.swapped_in_blocks,
        swapped_bytes=core.swapped_bytes,
        prompt_tokens=core.prompt_tokens,
        generation_tokens=core.generation_tokens,
        scheduled_tokens=core.scheduled_tokens,
        padded_tokens=int(device.get("padded_tokens_total", 0)),
        compiles=int(device.get("compiles_total", 0)),
        pipeline_ticks=int(device.get("pipeline_ticks_total", 0)),
        pipeline_idle_ticks=int(device.get("pipeline_idle_ticks_total", 0)),
        step_host_seconds=host_seconds - device.get("submit_wait_seconds", 0.0),
        step_device_seconds=float(device.get("device_seconds", 0.0)),
        iteration_tokens=core.iteration_tokens,
    )
