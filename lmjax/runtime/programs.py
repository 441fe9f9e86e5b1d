"""The set of all programs of an engine, with the shapes they are compiled for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lmjax.models import decoder
from lmjax.models.lora import abstract_adapters, put_adapter
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import ALONE, Env
from lmjax.parallel.placement import Placement
from lmjax.parallel.rules import LOGITS, POOL, REPLICATED, STAGES
from lmjax.runtime import gpu_settings
from lmjax.runtime.buckets import Buckets, ForwardKey, SampleKey
from lmjax.runtime.compiler import Program
from lmjax.runtime.forward import make_forward
from lmjax.runtime.inputs import PATCH_BATCH, forward_layout, sample_layout
from lmjax.runtime.sample import make_sample
from lmjax.runtime.state import (
    COPY_BATCH,
    SWAP_BATCH,
    DeviceState,
    apply_patches,
    copy_blocks,
    load_slot,
    swap_in,
    swap_out,
)
from lmjax.runtime.tick import copy_in_stage, make_tick, patch_stage, swap_into_stage, swap_out_of_stage
from lmjax.sampling.params import state_row_size
from lmjax.types import KVSpec

# keys of the programs that are neither forward nor sample
LOAD_SLOT, APPLY_PATCHES, COPY_BLOCKS = "load_slot", "apply_patches", "copy_blocks"
SWAP_OUT, SWAP_IN = "swap_out", "swap_in"
LOAD_ADAPTER = "load_adapter"


@dataclass(frozen=True)
class Shapes:
    """Everything that the programs' shapes follow from."""

    spec: DecoderSpec
    dtype: str
    kv_specs: tuple[KVSpec, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_logprobs: int
    env: Env = ALONE
    host_tier: bool = False
    placement: Placement | None = None  # None: the default device. Else spec and kv_specs are what all devices hold
    most_tokens: int = 0  # of a step; only a pipeline's state depends on it
    processed_logprobs: bool = False
    adapters: tuple[int, int] | None = None  # slots on the device and highest rank; None: there are no adapters

    @property
    def num_groups(self) -> int:
        return len(self.kv_specs)

    def pools(self) -> tuple[Any, ...]:
        return self._pools(self.num_blocks)

    def swapped(self) -> tuple[Any, ...]:
        """Blocks on their way between the pools and the host."""
        return self._pools((SWAP_BATCH,) * self.num_groups)

    def _pools(self, num_blocks: tuple[int, ...]) -> tuple[Any, ...]:
        pools = tuple(
            decoder.abstract_pool(kv, blocks, self.block_size)
            for kv, blocks in zip(self.kv_specs, num_blocks, strict=True)
        )
        return self.placement.place(pools, POOL) if self.placement else pools

    def params(self) -> Any:
        params = decoder.abstract_params(self.spec, self.dtype)
        return self.placement.place(params, self.placement.params(self.spec)) if self.placement else params

    def loras(self, slots: int | None = None) -> Any:
        """The adapters of all slots (None), or of so many. Without adapters: None."""
        if self.adapters is None:
            return None
        most, rank = self.adapters
        tree = abstract_adapters(self.spec, self.dtype, slots or most, rank)
        return self.placement.place(tree, self.placement.adapters(self.spec, rank)) if self.placement else tree

    def everywhere(self, tree: Any) -> Any:
        """Abstract arrays that every device holds whole."""
        return self.placement.place(tree) if self.placement else tree

    @property
    def stages(self) -> int:
        return self.spec.stages

    def packed(self, *shape: int) -> Any:
        """A step's int32 operand from the host, or those of the steps that are in the pipeline's stages."""
        return self.everywhere(_ints(*shape) if self.stages == 1 else _ints(self.stages, *shape))

    def state(self) -> DeviceState:
        slots, columns = self.max_num_seqs + 1, -(-self.max_model_len // self.block_size)
        state = DeviceState(
            tokens=_ints(slots, self.max_model_len),
            tables=_ints(self.num_groups, slots, columns),
            sampling=_ints(slots, state_row_size(self.spec.vocab)),
        )
        if self.stages == 1:
            return self.everywhere(state)
        assert self.placement is not None
        hidden = jax.ShapeDtypeStruct((self.stages, self.most_tokens, self.spec.hidden), jnp.dtype(self.dtype))
        own = {"tables": _ints(self.stages, *state.tables.shape), "hidden": hidden}
        return self.everywhere(state).replace(**self.placement.place(own, STAGES))


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def forward_program(shapes: Shapes, key: ForwardKey) -> Program:
    """With pipeline stages: one tick."""
    state, place, limits = shapes.state(), shapes.placement, (key, shapes.block_size, shapes.max_logprobs)
    packed = shapes.packed(forward_layout(key, shapes.num_groups, shapes.block_size).size)
    spec = place.share(shapes.spec) if place else shapes.spec
    own: tuple[Any, ...] = (state.tables,)
    if shapes.stages == 1:
        function = make_forward(spec, *limits, shapes.env)
    else:
        function = make_tick(spec, *limits, shapes.stages, shapes.env)
        own = (state.tables, state.hidden)
    if place:
        adapters = place.adapters(shapes.spec, shapes.adapters[1]) if key.adapters and shapes.adapters else None
        function = place.wrap_forward(function, shapes.spec, shapes.num_groups, key.pooled, adapters)
    loras = (shapes.loras(),) if key.adapters else ()
    arguments = (shapes.params(), shapes.pools(), state.tokens, *own, packed, *loras)
    donate = tuple(range(1, 3 + len(own)))
    return Program(key.name, function, arguments, donate, gpu_settings.program_options(shapes.env))


def sample_program(shapes: Shapes, key: SampleKey) -> Program:
    state, place = shapes.state(), shapes.placement
    logits: Any = jax.ShapeDtypeStruct((shapes.spec.num_vocab_rows, key.num_rows), jnp.float32)
    if place:
        logits = place.place(logits, LOGITS)
    packed = shapes.everywhere(_ints(sample_layout(key.num_rows).size))
    function = make_sample(key, shapes.max_logprobs, shapes.spec.vocab, shapes.env, shapes.processed_logprobs)
    if place:
        function = place.wrap_sample(function)
    arguments = (logits, state.tokens, state.sampling, packed)
    return Program(key.name, function, arguments, (1,), gpu_settings.program_options(shapes.env))


def all_programs(shapes: Shapes, buckets: Buckets) -> dict[Hashable, Program]:
    """Every program the engine may call, the slow ones to compile first."""
    state = shapes.state()
    slot = shapes.everywhere(_ints(1 + state.sampling.shape[1] + shapes.max_model_len))
    pairs = shapes.packed(shapes.num_groups, COPY_BATCH, 2)
    patches = shapes.packed(PATCH_BATCH, 4)
    patch, copy, out, back = apply_patches, copy_blocks, swap_out, swap_in
    if shapes.stages > 1:
        assert shapes.placement is not None
        pools = (POOL,) * shapes.num_groups
        patch = shapes.placement.wrap(patch_stage, (STAGES, REPLICATED), STAGES)
        copy = shapes.placement.wrap(copy_in_stage, (pools, REPLICATED), pools)
        out = shapes.placement.wrap(swap_out_of_stage, (pools, REPLICATED), pools)
        back = shapes.placement.wrap(swap_into_stage, (pools, pools, REPLICATED), (pools, STAGES))
    forward_keys = sorted(buckets.every_forward, key=lambda key: (-key.prompt_logprobs, -key.num_tokens))
    programs: dict[Hashable, Program] = {
        **{key: forward_program(shapes, key) for key in forward_keys},
        **{key: sample_program(shapes, key) for key in sorted(buckets.sample, key=lambda key: -key.level)},
        LOAD_SLOT: Program(LOAD_SLOT, load_slot, (state.tokens, state.sampling, slot), donate=(0, 1)),
        APPLY_PATCHES: Program(APPLY_PATCHES, patch, (state.tables, patches), donate=(0,)),
        COPY_BLOCKS: Program(COPY_BLOCKS, copy, (shapes.pools(), pairs), donate=(0,)),
    }
    if shapes.host_tier:
        pairs = shapes.packed(shapes.num_groups, SWAP_BATCH, 2)
        programs[SWAP_OUT] = Program(SWAP_OUT, out, (shapes.pools(), pairs))
        programs[SWAP_IN] = Program(SWAP_IN, back, (shapes.pools(), shapes.swapped(), pairs), donate=(0,))
    if shapes.adapters:
        programs[LOAD_ADAPTER] = load_adapter_program(shapes)
    return programs


def load_adapter_program(shapes: Shapes) -> Program:
    """Puts an adapter into a slot. Its last argument: int32 [2], the adapter's number (which the program has no use
    for) and the slot."""

    def load_adapter(every: Any, one: Any, packed: jax.Array) -> Any:
        return put_adapter(every, one, packed[1])

    function, place = load_adapter, shapes.placement
    if place and shapes.adapters:
        specs = place.adapters(shapes.spec, shapes.adapters[1])
        function = place.wrap(load_adapter, (specs, specs, REPLICATED), specs)
    arguments = (shapes.loras(), shapes.loras(slots=1), shapes.everywhere(_ints(2)))
    return Program(LOAD_ADAPTER, function, arguments, donate=(0,))
