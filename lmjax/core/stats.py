"""Counters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerStats:
    """Counters are totals since the start. ``iteration_tokens``: of the steps since the last snapshot.

    ``hash_seconds``: time in naming blocks and looking prefixes up. ``plan_seconds``: in all of schedule and update.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    scheduled_tokens: int = 0
    hash_seconds: float = 0.0
    plan_seconds: float = 0.0
    swaps_out: int = 0  # preempted requests of which something went to the host
    swaps_in: int = 0  # and came back from there
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swapped_bytes: int = 0  # both ways
    host_usage: float = 0.0
    host_queries: int = 0  # those of ``prefix_queries`` that were not on the device, if there is a host tier
    host_hits: int = 0  # those of ``prefix_hits`` that were in the host tier
    iteration_tokens: list[int] = field(default_factory=list)
