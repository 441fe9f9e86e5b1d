"""The executor on JAX: keeps the device's state and runs the compiled programs of each plan, in order."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lmjax.core.plan import ExecutorInfo, PromptLogprobs, StepPlan, StepResult
from lmjax.runtime.compiler import CompileMonitor
from lmjax.runtime.inputs import MAX_IN_FLIGHT, InputPacker, PackedStep
from lmjax.runtime.programs import APPLY_PATCHES, COPY_BLOCKS, LOAD_SLOT
from lmjax.runtime.state import DeviceState, pack_copies, pack_slot
from lmjax.sampling.params import needs_slot_state


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine tells of the model and the machine. ``path``: where the tokenizer is."""

    path: str
    model_type: str
    dtype: str
    platform: str  # "cpu", "gpu"
    device_count: int
    config: dict[str, Any]
    generation_config: dict[str, Any]


@dataclass(slots=True, eq=False)
class InFlight:
    """A submitted step: device arrays that are never donated, so that reading them copies no pool."""

    plan: StepPlan
    packed: PackedStep
    submitted: float
    last: jax.Array  # the step is done when this is
    result: jax.Array | None  # int32 [S, columns]; None: no row samples
    prompt_logprobs: jax.Array | None  # int32 [T, 3 + 2 k]


class JaxExecutor:
    """Implements ``core.plan.Executor``; made by ``build_executor``. One thread at a time."""

    def __init__(
        self,
        *,
        info: ExecutorInfo,
        model_info: ModelInfo,
        params: Any,
        pools: tuple[jax.Array, ...],
        state: DeviceState,
        programs: dict[Hashable, Any],
        packer: InputPacker,
        monitor: CompileMonitor,
    ):
        self.info = info
        self.model_info = model_info
        self._params = params
        self._pools = pools
        self._tokens, self._tables, self._sampling = state.tokens, state.tables, state.sampling
        self._programs = programs
        self._packer = packer
        self._monitor = monitor
        self._num_in_flight = 0
        self._padded_tokens = 0
        self._device_seconds = 0.0
        self._last_done = 0.0

    def submit(self, plan: StepPlan) -> InFlight:
        """Dispatches the plan's programs and the copy of their result to the host."""
        if self._num_in_flight == MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight already: collect one first")
        with self._monitor.watch():
            in_flight = self._submit(plan)
        self._num_in_flight += 1
        return in_flight

    def _submit(self, plan: StepPlan) -> InFlight:
        begin = time.monotonic()
        programs = self._programs
        for load in plan.slot_loads:
            self._packer.load_slot(load)
            if needs_slot_state(load):
                packed_slot = pack_slot(load, self.info.vocab_size, self.info.max_model_len)
                self._tokens, self._sampling = programs[LOAD_SLOT](self._tokens, self._sampling, packed_slot)
        packed = self._packer.pack(plan)
        for patches in packed.overflow:
            self._tables = programs[APPLY_PATCHES](self._tables, patches)
        for pairs in pack_copies(plan.copies, len(self._pools)):
            self._pools = programs[COPY_BLOCKS](self._pools, pairs)
        key = packed.forward_key
        logits, self._pools, self._tokens, self._tables, prompt = programs[key](
            self._params, self._pools, self._tokens, self._tables, packed.forward
        )
        last, result = logits, None
        if packed.sample_key is not None:
            self._tokens, result = programs[packed.sample_key](logits, self._tokens, self._sampling, packed.sample)
            last = result
        for array in (result, prompt):
            if array is not None:
                array.copy_to_host_async()
        self._padded_tokens += key.num_tokens - plan.num_tokens
        return InFlight(plan, packed, begin, last, result, prompt)

    def collect(self, in_flight: InFlight) -> StepResult:
        """Waits for the step. Steps are collected in the order they were submitted."""
        with self._monitor.watch():
            in_flight.last.block_until_ready()
            result = self._read(in_flight)
        self._num_in_flight -= 1
        now = time.monotonic()
        self._device_seconds += now - max(in_flight.submitted, self._last_done)
        self._last_done = now
        return result

    def _read(self, in_flight: InFlight) -> StepResult:
        plan = in_flight.plan
        if in_flight.result is None:
            rows = np.full((plan.num_rows, 1), -1, np.int32)
        else:
            rows = np.asarray(in_flight.result)[: plan.num_rows]
            if not in_flight.packed.wants_logprobs and rows.shape[1] > 1:  # the program had no form without
                rows = rows[:, :1].copy()
        result = StepResult(rows)
        if in_flight.prompt_logprobs is not None:
            result.prompt_logprobs = read_prompt_logprobs(plan, np.asarray(in_flight.prompt_logprobs))
        return result

    def stats(self) -> dict[str, float]:
        """``compiles_total`` (since ready), ``padded_tokens_total``, ``device_seconds``: time in which a step ran, as
        seen by this thread (a step that ended while nobody waited counts until it was collected)."""
        return {
            "compiles_total": self._monitor.count,
            "padded_tokens_total": self._padded_tokens,
            "device_seconds": self._device_seconds,
        }

    def close(self) -> None:
        """Waits for what runs and frees the device's memory. May be called twice."""
        arrays = jax.tree.leaves((self._pools, self._tokens, self._tables, self._sampling))
        for array in arrays:
            if not array.is_deleted():
                array.block_until_ready()
                array.delete()
        self._params = None
        self._programs = {}


def read_prompt_logprobs(plan: StepPlan, packed: np.ndarray) -> list[PromptLogprobs]:
    """packed: token rows, int32 [T, 3 + 2 k], by token of the step. One record a prefill row that has targets."""
    assert plan.target_ids is not None
    records = []
    start = 0
    for row in range(plan.num_decode, plan.num_rows):
        end = start + int(plan.lengths[row])
        wanted = np.flatnonzero(plan.target_ids[start:end] >= 0)
        if len(wanted):
            first, last = int(wanted[0]), int(wanted[-1])
            assert last - first + 1 == len(wanted), "a row's targets have no gaps"
            at = plan.num_decode + start + first
            # the token at position p predicts the one at p + 1
            position = int(plan.starts[row]) + first + 1
            records.append(PromptLogprobs(int(plan.handles[row]), position, packed[at : at + len(wanted)]))
        start = end
    return records
