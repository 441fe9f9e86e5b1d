"""The set of all programs of an engine, with the shapes they are compiled for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lmjax.models import decoder
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import ALONE, Env
from lmjax.parallel.placement import Placement
from lmjax.parallel.rules import LOGITS, POOL
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
from lmjax.sampling.params import state_row_size
from lmjax.types import KVSpec

# keys of the programs that are neither forward nor sample
LOAD_SLOT, APPLY_PATCHES, COPY_BLOCKS = "load_slot", "apply_patches", "copy_blocks"
SWAP_OUT, SWAP_IN = "swap_out", "swap_in"


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

    @property
    def num_groups(self) -> int:
        return len(self.kv_specs)

    def pools(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self._pools(self.num_blocks)

    def swapped(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Blocks on their way between the pools and the host."""
        return self._pools((SWAP_BATCH,) * self.num_groups)

    def _pools(self, num_blocks: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        pools = tuple(
            jax.ShapeDtypeStruct(decoder.pool_shape(kv, blocks, self.block_size), jnp.dtype(kv.dtype))
            for kv, blocks in zip(self.kv_specs, num_blocks, strict=True)
        )
        return self.placement.place(pools, POOL) if self.placement else pools

    def params(self) -> Any:
        params = decoder.abstract_params(self.spec, self.dtype)
        return self.placement.place(params, self.placement.params(self.spec)) if self.placement else params

    def everywhere(self, tree: Any) -> Any:
        """Abstract arrays that every device holds whole."""
        return self.placement.place(tree) if self.placement else tree

    def state(self) -> DeviceState:
        slots, columns = self.max_num_seqs + 1, -(-self.max_model_len // self.block_size)
        state = DeviceState(
            tokens=_ints(slots, self.max_model_len),
            tables=_ints(self.num_groups, slots, columns),
            sampling=_ints(slots, state_row_size(self.spec.vocab)),
        )
        return self.everywhere(state)


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def forward_program(shapes: Shapes, key: ForwardKey) -> Program:
    state, place = shapes.state(), shapes.placement
    packed = shapes.everywhere(_ints(forward_layout(key, shapes.num_groups, shapes.block_size).size))
    spec = place.share(shapes.spec) if place else shapes.spec
    function = make_forward(spec, key, shapes.block_size, shapes.max_logprobs, shapes.env)
    if place:
        function = place.wrap_forward(function, shapes.spec, shapes.num_groups)
    arguments = (shapes.params(), shapes.pools(), state.tokens, state.tables, packed)
    return Program(key.name, function, arguments, donate=(1, 2, 3))


def sample_program(shapes: Shapes, key: SampleKey) -> Program:
    state, place = shapes.state(), shapes.placement
    logits: Any = jax.ShapeDtypeStruct((shapes.spec.num_vocab_rows, key.num_rows), jnp.float32)
    if place:
        logits = place.place(logits, LOGITS)
    packed = shapes.everywhere(_ints(sample_layout(key.num_rows).size))
    function = make_sample(key, shapes.max_logprobs, shapes.spec.vocab, shapes.env.axis)
    if place:
        function = place.wrap_sample(function)
    return Program(key.name, function, (logits, state.tokens, state.sampling, packed), donate=(1,))


def all_programs(shapes: Shapes, buckets: Buckets) -> dict[Hashable, Program]:
    """Every program the engine may call, the slow ones to compile first."""
    state = shapes.state()
    slot = shapes.everywhere(_ints(1 + state.sampling.shape[1] + shapes.max_model_len))
    pairs = shapes.everywhere(_ints(shapes.num_groups, COPY_BATCH, 2))
    patches = shapes.everywhere(_ints(PATCH_BATCH, 4))
    forward_keys = (buckets.prompt_logprobs, *reversed(buckets.forward))
    programs: dict[Hashable, Program] = {
        **{key: forward_program(shapes, key) for key in forward_keys},
        **{key: sample_program(shapes, key) for key in sorted(buckets.sample, key=lambda key: -key.level)},
        LOAD_SLOT: Program(LOAD_SLOT, load_slot, (state.tokens, state.sampling, slot), donate=(0, 1)),
        APPLY_PATCHES: Program(APPLY_PATCHES, apply_patches, (state.tables, patches), donate=(0,)),
        COPY_BLOCKS: Program(COPY_BLOCKS, copy_blocks, (shapes.pools(), pairs), donate=(0,)),
    }
    if shapes.host_tier:
        pairs = shapes.everywhere(_ints(shapes.num_groups, SWAP_BATCH, 2))
        programs[SWAP_OUT] = Program(SWAP_OUT, swap_out, (shapes.pools(), pairs))
        programs[SWAP_IN] = Program(SWAP_IN, swap_in, (shapes.pools(), shapes.swapped(), pairs), donate=(0,))
    return programs
