"""The executor of a pipeline: a submitted step enters it, and all that are in it move on by one stage (see ``tick``).

One program runs all stages, so a tick has the bucket of the largest step in it, and the host sends what each stage has
to know: a step's buffer is sent again at every tick until it leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lmjax.core.plan import StepPlan, StepResult, empty_plan
from lmjax.runtime.buckets import Buckets, ForwardKey
from lmjax.runtime.device import Call
from lmjax.runtime.inputs import MAX_IN_FLIGHT, PATCH_BATCH, Layout, Ring, aligned_zeros, forward_layout
from lmjax.runtime.jax_executor import InFlight, JaxExecutor
from lmjax.runtime.programs import APPLY_PATCHES, COPY_BLOCKS, SWAP_IN, SWAP_OUT
from lmjax.runtime.state import COPY_BATCH, SWAP_BATCH, pack_copies, pack_swaps


@dataclass(slots=True, eq=False)
class _Held:
    """A step in the pipeline. The rest: what each stage does before the step's forward there."""

    in_flight: InFlight
    swaps_out: list[np.ndarray]  # int32 [G, SWAP_BATCH, 2] each
    swaps_in: list[np.ndarray]
    copies: list[np.ndarray]  # int32 [G, COPY_BATCH, 2] each
    overflow: list[np.ndarray] = field(default_factory=list)  # int32 [PATCH_BATCH, 4] each


class _Buffer(NamedTuple):
    whole: np.ndarray  # int32 [stages, size]
    parts: list[dict[str, np.ndarray]]  # views, by stage


class PipelineExecutor(JaxExecutor):
    """Implements ``core.plan.Executor`` with ``info.stages`` > 1."""

    def __init__(self, *, buckets: Buckets, **rest: Any):
        super().__init__(**rest)
        stages, info = self.info.stages, self.info
        self._buckets = buckets
        self._nothing = empty_plan()
        self._held: deque[_Held] = deque(maxlen=stages)  # by stage
        layouts = {
            key: forward_layout(key, len(info.kv_specs), info.block_size)
            for key in (*buckets.forward, buckets.prompt_logprobs)
        }
        # until the first step leaves nothing is collected: so many ticks may wait for the device
        size = MAX_IN_FLIGHT + stages
        self._rings = {key: Ring(partial(_stages, layout, stages), size) for key, layout in layouts.items()}
        self._last: tuple[ForwardKey, _Buffer] | None = None
        self._no_patches = np.tile(np.array([0, info.max_num_seqs, 0, 0], np.int32), (PATCH_BATCH, 1))
        self._no_swaps = np.zeros((len(info.kv_specs), SWAP_BATCH, 2), np.int32)
        self._no_copies = np.zeros((len(info.kv_specs), COPY_BATCH, 2), np.int32)
        self._ticks = self._idle_ticks = 0

    def _dispatch(self, plan: StepPlan, begin: float) -> InFlight:
        entering, groups = InFlight(plan, self._load_calls(plan), begin), len(self.info.kv_specs)
        out, back = pack_swaps(plan.swaps_out, groups), pack_swaps(plan.swaps_in, groups)
        self._held.appendleft(_Held(entering, out, back, pack_copies(plan.copies, groups)))
        leaving = self._held[-1].in_flight if len(self._held) == self.info.stages else None
        key = self._choose(leaving)
        buffer = self._pack(key)
        calls = entering.calls
        calls += self._each(SWAP_OUT, [held.swaps_out for held in self._held], self._no_swaps)
        calls += self._each(SWAP_IN, [held.swaps_in for held in self._held], self._no_swaps)
        calls += self._each(APPLY_PATCHES, [held.overflow for held in self._held], self._no_patches)
        calls += self._each(COPY_BLOCKS, [held.copies for held in self._held], self._no_copies)
        calls.append(Call(key, buffer.whole))
        if leaving is not None:
            sample_key, sample, leaving.wants_logprobs = self._packer.pack_sample(leaving.plan, buffer.parts[-1])
            if sample_key is not None:
                assert sample is not None
                calls.append(Call(sample_key, sample))
        outputs = self._device.run(calls)
        if leaving is not None:
            leaving.outputs = outputs
        self._count(key, plan)
        return entering

    def _choose(self, leaving: InFlight | None) -> ForwardKey:
        """The smallest program with room for every step in the pipeline."""
        if leaving is not None and leaving.plan.target_ids is not None:
            return self._buckets.prompt_logprobs
        plans = [held.in_flight.plan for held in self._held]
        tokens, rows = max(plan.num_tokens for plan in plans), max(plan.num_rows for plan in plans)
        for key in self._buckets.forward[bisect_left(self._buckets.token_buckets, tokens) :]:
            if rows <= key.num_rows:
                return key
        raise ValueError(f"a step of {tokens} tokens in {rows} rows does not fit the largest program")

    def _pack(self, key: ForwardKey) -> _Buffer:
        """The buffers of all stages. What did not change since the last tick is copied."""
        buffer, last = self._rings[key].take(), self._last
        moved = last[1].whole if last is not None and last[0] == key else None
        for stage, parts in enumerate(buffer.parts):
            held = self._held[stage] if stage < len(self._held) else None
            if stage and moved is not None:
                buffer.whole[stage] = moved[stage - 1]
            elif held is not None:
                held.overflow = self._packer.fill(held.in_flight.plan, parts)
            else:
                self._packer.fill(self._nothing, parts)
        self._last = key, buffer
        return buffer

    def _each(self, key: str, batches: list[list[np.ndarray]], nothing: np.ndarray) -> list[Call]:
        """Calls of a program that every stage runs for the step that it holds: as many as the step with the most."""
        calls = []
        for i in range(max(map(len, batches))):
            whole = aligned_zeros(self.info.stages * nothing.size).reshape(self.info.stages, *nothing.shape)
            for stage in range(self.info.stages):
                own = batches[stage] if stage < len(batches) else []
                whole[stage] = own[i] if i < len(own) else nothing
            calls.append(Call(key, whole))
        return calls

    def _count(self, key: ForwardKey, plan: StepPlan) -> None:
        self._ticks += 1
        self._idle_ticks += plan.num_rows == 0
        self._padded_tokens += key.num_tokens - plan.num_tokens

    def collect(self, in_flight: InFlight) -> StepResult:
        if not in_flight.plan.num_rows:
            self._num_in_flight -= 1
            return StepResult(np.zeros((0, 1), np.int32))
        return super().collect(in_flight)

    def stats(self) -> dict[str, float]:
        """Also ``pipeline_ticks_total``, and ``pipeline_idle_ticks_total``: those in which no step entered."""
        return super().stats() | {
            "pipeline_ticks_total": self._ticks,
            "pipeline_idle_ticks_total": self._idle_ticks,
        }


def _stages(layout: Layout, stages: int) -> _Buffer:
    whole = aligned_zeros(stages * layout.size).reshape(stages, layout.size)
    return _Buffer(whole, [layout.split(row) for row in whole])
