"""The executor on JAX: turns each plan into calls of compiled programs, and what they leave into a result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lmjax.config import ConfigError
from lmjax.core.plan import POOLED, ExecutorInfo, PromptLogprobs, StepPlan, StepResult
from lmjax.runtime.adapt import Adapted, Adapter
from lmjax.runtime.compiler import CompileMonitor
from lmjax.runtime.device import Call, Device, Outputs
from lmjax.runtime.inputs import MAX_IN_FLIGHT, InputPacker, aligned_zeros
from lmjax.runtime.live import Loading, check_layout
from lmjax.runtime.platform import own_context
from lmjax.runtime.programs import APPLY_PATCHES, COPY_BLOCKS, LOAD_ADAPTER, LOAD_SLOT, SWAP_IN, SWAP_OUT
from lmjax.runtime.state import pack_copies, pack_slot, pack_swaps
from lmjax.sampling.params import needs_slot_state
from lmjax.types import OrderError, ParameterError
from lmjax.weights.lora import HostAdapter
from lmjax.weights.trees import Names

if TYPE_CHECKING:
    from lmjax.runtime.ranks import Leader


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
    plan: StepPlan
    calls: list[Call]
    submitted: float
    wants_logprobs: bool = False
    outputs: Outputs | None = None  # None: the step is in an earlier stage of the pipeline


class JaxExecutor:
    """Implements ``core.plan.Executor``; made by ``build_executor``. One thread at a time."""

    def __init__(
        self,
        *,
        info: ExecutorInfo,
        model_info: ModelInfo,
        device: Device | Leader,
        packer: InputPacker,
        monitor: CompileMonitor,
        adapter: Adapter | None = None,
        from_files: bool = True,
        functional: dict[str, Any] | None = None,
        packed: bool = False,
        read_adapter: Callable[[str], HostAdapter] | None = None,
    ):
        """adapter: takes weights from memory; None: they are spread over processes. from_files: those of the start.
        functional: see ``LLM.functional``. packed: some weights are kept quantised. read_adapter: see
        ``Executor.read_adapter``; None: there are no adapters."""
        self._read_adapter = read_adapter
        self._packed = packed
        self.functional = functional
        self.info = info
        self.model_info = model_info
        self._device = device
        self._packer = packer
        self._monitor = monitor
        self._adapter = adapter
        self._num_in_flight = 0
        # what the weights came from; "": files of the start; None: they were arrays
        self._files: str | None = "" if from_files else None
        self._padded_tokens = 0
        self._device_seconds = 0.0
        self._last_done = 0.0

    def submit(self, plan: StepPlan) -> InFlight:
        """Dispatches the plan's programs and the copy of their result to the host."""
        most = MAX_IN_FLIGHT + self.info.stages - 1
        if self._num_in_flight == most:
            raise RuntimeError(f"{most} steps are in flight already: collect one first")
        begin = time.monotonic()
        with self._monitor.watch():
            in_flight = self._dispatch(plan, begin)
        self._num_in_flight += 1
        return in_flight

    def _dispatch(self, plan: StepPlan, begin: float) -> InFlight:
        groups = len(self.info.kv_specs)
        calls = [Call(SWAP_OUT, pairs) for pairs in pack_swaps(plan.swaps_out, groups)]  # before anything is written
        calls += [Call(SWAP_IN, pairs) for pairs in pack_swaps(plan.swaps_in, groups)]
        calls += [Call(LOAD_ADAPTER, _pair(*load)) for load in plan.adapter_loads]
        calls += self._load_calls(plan)
        packed = self._packer.pack(plan)
        calls += [Call(APPLY_PATCHES, patches) for patches in packed.overflow]
        calls += [Call(COPY_BLOCKS, pairs) for pairs in pack_copies(plan.copies, groups)]
        calls.append(Call(packed.forward_key, packed.forward))
        if packed.sample_key is not None:
            assert packed.sample is not None
            calls.append(Call(packed.sample_key, packed.sample))
        self._padded_tokens += packed.forward_key.num_tokens - plan.num_tokens
        return InFlight(plan, calls, begin, packed.wants_logprobs, self._device.run(calls))

    def _load_calls(self, plan: StepPlan) -> list[Call]:
        """Of the requests that take a slot: those whose sampling needs state on the device."""
        calls = []
        for load in plan.slot_loads:
            self._packer.load_slot(load)
            if needs_slot_state(load):
                calls.append(Call(LOAD_SLOT, pack_slot(load, self.info.vocab_size, self.info.max_model_len)))
        return calls

    def collect(self, in_flight: InFlight) -> StepResult:
        """Waits for the step. Steps are collected in the order they were submitted."""
        assert in_flight.outputs is not None, "the step has not reached the last stage"
        with self._monitor.watch():
            in_flight.outputs.last.block_until_ready()
            result = self._read(in_flight, in_flight.outputs)
        self._num_in_flight -= 1
        now = time.monotonic()
        result.seconds = now - max(in_flight.submitted, self._last_done)
        self._device_seconds += result.seconds
        self._last_done = now
        return result

    def _read(self, in_flight: InFlight, outputs: Outputs) -> StepResult:
        plan = in_flight.plan
        if outputs.result is None:
            rows = np.full((plan.num_rows, 1), -1, np.int32)
        else:
            rows = np.asarray(outputs.result)[: plan.num_rows]
            if not in_flight.wants_logprobs and rows.shape[1] > 1:  # the program had no form without
                rows = rows[:, :1].copy()
        result = StepResult(rows)
        if outputs.prompt_logprobs is not None:
            result.prompt_logprobs = read_prompt_logprobs(plan, np.asarray(outputs.prompt_logprobs))
        if outputs.pooled is not None and plan.target_ids is not None and (plan.target_ids == POOLED).any():
            result.prompt_logprobs += read_pooled(plan, np.asarray(outputs.pooled))
        return result

    # adapters

    def read_adapter(self, path: str) -> HostAdapter:
        assert self._read_adapter is not None, "there are no adapters"
        return self._read_adapter(path)

    def add_adapter(self, adapter: int, found: HostAdapter) -> None:
        assert isinstance(self._device, Device)
        self._device.adapters[adapter] = found.tree

    def drop_adapter(self, adapter: int) -> None:
        assert isinstance(self._device, Device)
        del self._device.adapters[adapter]

    # weights and sleep

    def context(self) -> AbstractContextManager[None]:
        return own_context()

    def has_lost_params(self) -> bool:
        params = self._device.params
        return params is not None and params.embed.is_deleted()  # one tells: a tree is donated whole

    @property
    def params(self) -> Any:
        """The tree that the next step runs with, ``models.params.DecoderParams``; None: it was freed."""
        return self._device.params

    @property
    def has_params(self) -> bool:
        return self._device.params is not None

    def adapt(self, tree: Any, names: Names | None = None) -> Adapted:
        """``tree`` (see ``weights.trees.read_tree``) in the layout, type and sharding of ``params``; nothing else
        changes. names: those given at the start, if None. Raises ``WeightError``, and ``ConfigError`` on several hosts.
        """
        if self._packed:
            return self._as_it_is(tree)
        if self._adapter is None:
            raise ConfigError("params: this engine's weights are spread over several processes (--nnodes)")
        return self._adapter.adapt(tree, names)

    def _as_it_is(self, tree: Any) -> Adapted:
        try:
            check_layout(tree, self._device.layout)
        except ParameterError as error:
            raise ConfigError(
                "this engine keeps its weights quantised: new ones come from files, or as a tree like LLM.params "
                f"({error})"
            ) from error
        return Adapted(tree, len(jax.tree.leaves(tree)), 0, 0, 0.0)

    def check_params(self, tree: Any) -> None:
        """Raises ``ParameterError`` for anything but jax arrays with the shapes, dtypes and shardings of ``params``."""
        if self._device.many_processes:
            raise ParameterError("params", "arrays are for one process; on several hosts weights come from files")
        check_layout(tree, self._device.layout)

    def set_params(self, params: Any) -> None:
        """The steps submitted from now on read these very buffers: a tree as ``check_params`` takes it, or what
        ``start_loading`` gave, when it is done."""
        if isinstance(params, Loading):
            self._files = params.path or self._files
        else:
            self.check_params(params)
            self._files = None
        self._device.set_params(params)

    def start_loading(self, path: str | None) -> Loading:
        """None: the files that the present weights came from."""
        if path is None and self._files is None:
            raise ParameterError("params", "are missing: the weights were set from arrays, so no file has them")
        return self._device.start_loading(path or self._files or None)

    def sleep(self, level: int) -> None:
        with self._monitor.watch():
            self._device.sleep(level)

    def wake(self) -> None:
        """Raises ``OrderError`` where the memory is not there (yet): it sleeps on."""
        with self._monitor.watch():
            try:
                self._device.wake()
            except jax.errors.JaxRuntimeError as error:
                raise OrderError(f"the engine could not wake up: {error}", internal=True) from error

    def stats(self) -> dict[str, float]:
        """``compiles_total`` (since ready), ``padded_tokens_total``, ``device_seconds``: time in which a step ran, as
        seen by this thread (a step that ended while nobody waited counts until it was collected).
        ``submit_wait_seconds``: of ``submit``, in which it waited for a device."""
        return {
            "compiles_total": self._monitor.count,
            "padded_tokens_total": self._padded_tokens,
            "device_seconds": self._device_seconds,
            "submit_wait_seconds": self._device.waited,
        }

    def close(self) -> None:
        """Waits for what runs and frees the device's memory. May be called twice."""
        self._device.close()


def _pair(*numbers: int) -> np.ndarray:
    packed = aligned_zeros(2)
    packed[:] = numbers
    return packed


def read_prompt_logprobs(plan: StepPlan, packed: np.ndarray) -> list[PromptLogprobs]:
    """packed: token rows and entropies, int32 [T, 3 + 2 k + 1], by token of the step. One record a prefill row that has
    targets."""
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
            found = packed[at : at + len(wanted)]
            rows, entropies = np.ascontiguousarray(found[:, :-1]), np.ascontiguousarray(found[:, -1]).view(np.float32)
            records.append(PromptLogprobs(int(plan.handles[row]), position, rows, entropies))
        start = end
    return records


def read_pooled(plan: StepPlan, sums: np.ndarray) -> list[PromptLogprobs]:
    """sums: float32 [S, D], by row of the step. One record a prefill row that has tokens to pool."""
    assert plan.target_ids is not None
    records, start = [], 0
    for row in range(plan.num_decode, plan.num_rows):
        end = start + int(plan.lengths[row])
        marked = np.flatnonzero(plan.target_ids[start:end] == POOLED)
        if len(marked):
            first = int(plan.starts[row]) + int(marked[0])
            own = sums[row : row + 1].copy()  # not a view: the device's buffer would stay as long as it
            found = PromptLogprobs(int(plan.handles[row]), first, own, pooled=len(marked), key=int(plan.keys[row]))
            records.append(found)
        start = end
    return records
