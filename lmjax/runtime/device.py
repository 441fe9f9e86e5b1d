"""The arrays of one engine on its devices, and the compiled programs that move them from step to step."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from lmjax.runtime.buckets import ForwardKey, SampleKey
from lmjax.runtime.host_pool import HostPool
from lmjax.runtime.live import Load, Loading, layout_of, maker_of_zeros
from lmjax.runtime.platform import give_back_memory
from lmjax.runtime.programs import APPLY_PATCHES, COPY_BLOCKS, LOAD_ADAPTER, LOAD_SLOT, SWAP_IN, SWAP_OUT
from lmjax.runtime.state import DeviceState


class Call(NamedTuple):
    """A program and the one operand that comes from the host. A step is a few of these."""

    key: Hashable
    packed: np.ndarray  # int32; it must not change before the step was collected


@dataclass(slots=True, eq=False)
class Outputs:
    """What a step leaves for the host: arrays that are never donated, so that reading them copies no pool."""

    last: jax.Array  # the step is done when this is
    result: jax.Array | None = None  # int32 [S, columns]; None: no row samples
    prompt_logprobs: jax.Array | None = None  # int32 [T, 3 + 2 k + 1]
    pooled: jax.Array | None = None  # float32 [S, D]


class Device:
    """Everything that a step reads and writes. It decides nothing: the same calls in the same order on every process
    of an engine keep their shares of the arrays in step."""

    def __init__(
        self,
        params: Any,
        pools: tuple[Any, ...],
        state: DeviceState,
        programs: dict[Hashable, Any],
        host_blocks: tuple[int, ...] = (),
        load: Load | None = None,
        loras: Any = None,
    ) -> None:
        """host_blocks: places in host memory per group, the null block included; empty: there is no host tier.
        load: reads other weights for these devices. loras: the adapters of all slots, None: there are none."""
        self.params = params
        self.layout = layout_of(params)
        self.load = load
        self._new_pools = maker_of_zeros(layout_of(pools))
        self._host_blocks = host_blocks
        self._loras = loras
        self.adapters: dict[int, Any] = {}  # by number: trees of numpy arrays, which ``LOAD_ADAPTER`` puts into slots
        self._pools = pools
        self._tokens, self._sampling = state.tokens, state.sampling
        # what the forward moves on beside pools and tokens: block tables, and in a pipeline hidden states
        self._moved = [state.tables] if state.hidden is None else [state.tables, state.hidden]
        self._programs = programs
        devices: Any = jax.tree.leaves(pools)[0].sharding.device_set
        # XLA:CPU's devices take the collectives of two programs that run at once for each other, and wait for ever
        self._one_at_a_time = len(devices) > 1 and next(iter(devices)).platform == "cpu"
        self.waited = 0.0  # seconds in ``run`` for that
        self.host = HostPool(pools, host_blocks) if host_blocks else None

    @property
    def keys(self) -> list[Hashable]:
        """Of all programs, in an order that is the same in every process."""
        return sorted(self._programs, key=repr)

    def run(self, calls: Sequence[Call]) -> Outputs:
        """Dispatches a step's programs, its one forward among them, and the copy of their result to the host."""
        outputs: Outputs | None = None
        for key, packed in calls:
            program = self._programs[key]
            if isinstance(key, ForwardKey):
                loras = (self._loras,) if key.adapters else ()
                logits, self._pools, self._tokens, *self._moved, prompt = program(
                    self.params, self._pools, self._tokens, *self._moved, packed, *loras
                )
                outputs = Outputs(logits, None, *(prompt or (None, None)))
            elif isinstance(key, SampleKey):
                assert outputs is not None, "nothing to sample from"
                self._tokens, outputs.result = program(outputs.last, self._tokens, self._sampling, packed)
                outputs.last = outputs.result
            else:
                self._change(key, program, packed)
            if self._one_at_a_time:
                self._wait(outputs.last if outputs else None)
        assert outputs is not None, "a step has a forward"
        for array in (outputs.result, outputs.prompt_logprobs, outputs.pooled):
            if array is not None:
                array.copy_to_host_async()
        if self.host is not None:
            self.host.land_ready()
        return outputs

    def _wait(self, last: jax.Array | None) -> None:
        begin = time.perf_counter()
        jax.block_until_ready((self._pools, self._tokens, self._moved, self._sampling, self._loras, last))
        self.waited += time.perf_counter() - begin

    def _change(self, key: Hashable, program: Any, packed: np.ndarray) -> None:
        if key == LOAD_SLOT:
            self._tokens, self._sampling = program(self._tokens, self._sampling, packed)
        elif key == LOAD_ADAPTER:
            # one on its way at a time: what ``resolve.step_bytes`` has room for
            jax.block_until_ready(self._loras)
            self._loras = program(self._loras, self.adapters[int(packed[0])], packed)
        elif key == APPLY_PATCHES:
            self._moved[0] = program(self._moved[0], packed)
        elif key == COPY_BLOCKS:
            self._pools = program(self._pools, packed)
        elif key == SWAP_OUT:
            self.swap_out(packed)
        elif key == SWAP_IN:
            self.swap_in(packed)
        else:
            raise KeyError(f"no program {key}")

    def swap_out(self, pairs: np.ndarray) -> None:
        """Starts the way of blocks to their places on the host. pairs: int32 [G, SWAP_BATCH, 2] of (block, place)."""
        assert self.host is not None
        self.host.keep(self._programs[SWAP_OUT](self._pools, pairs), pairs)

    def swap_in(self, pairs: np.ndarray) -> None:
        """And back. pairs: int32 [G, SWAP_BATCH, 2] of (place, block)."""
        assert self.host is not None
        self._pools, done = self._programs[SWAP_IN](self._pools, self.host.stage(pairs), pairs)
        self.host.staged(done)

    many_processes = False

    def set_params(self, params: Any) -> None:
        """params: as ``layout`` says, or a ``Loading`` that is done."""
        self.params = params.take() if isinstance(params, Loading) else params

    def start_loading(self, path: str | None) -> Loading:
        assert self.load is not None, "there are no files"
        return Loading(path, self.load)

    def sleep(self, level: int) -> None:
        """Frees the pools; level 2: weights and places on the host, too. Nothing may be on its way. What others hold
        of the weights stays theirs."""
        for pool in jax.tree.leaves(self._pools):
            pool.block_until_ready()
            pool.delete()
        self._pools = ()
        if self.host is not None:
            self.host.land_all()
            self.host.wait()
        if level == 2:
            self.params = self.host = None
        give_back_memory()

    def wake(self) -> None:
        """Makes what ``sleep`` has freed anew, empty, but for the weights: they were set before."""
        assert self.params is not None, "there are no weights"
        if not self._pools:
            self._pools = self._new_pools()
        if self.host is None and self._host_blocks:
            self.host = HostPool(self._pools, self._host_blocks)

    def close(self) -> None:
        """Waits for what runs and frees the memory. May be called twice."""
        for array in jax.tree.leaves((self._pools, self._tokens, self._moved, self._sampling, self._loras)):
            if not array.is_deleted():
                array.block_until_ready()
                array.delete()
        self.params = self.host = None
        self.adapters = {}
        self._programs = {}
