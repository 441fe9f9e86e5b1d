"""Llama-3.1-8B's shape with random weights, its programs, and decode steps to run them on."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_parts.llama import LLAMA_8B, SMALL
from benchmarks.gpu_parts.session import Session, randoms, tree_bytes
from lmjax.core.plan import ExecutorInfo, SlotLoad, StepPlan
from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import Env
from lmjax.runtime.buckets import GREEDY, Buckets, ForwardKey, SampleKey
from lmjax.runtime.compiler import CompileMonitor
from lmjax.runtime.device import Device
from lmjax.runtime.inputs import PATCH_BATCH, InputPacker
from lmjax.runtime.jax_executor import JaxExecutor, ModelInfo
from lmjax.runtime.programs import APPLY_PATCHES, Program, Shapes, forward_program, sample_program
from lmjax.runtime.state import apply_patches
from lmjax.types import SamplingParams

BLOCK = 16
ROOM = 64  # positions that steps cycle through after the context


def model(s: Session) -> tuple[DecoderSpec, Any]:
    """The spec and bfloat16 parameters, made on the device."""
    spec = spec_from_hf(s.pick(LLAMA_8B, SMALL), None)

    def make(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if len(leaf.shape) == 1:  # norms
            return jnp.ones(leaf.shape, leaf.dtype)
        return randoms(leaf.shape, leaf.dtype, zlib.crc32(str(path).encode()), leaf.shape[-1] ** -0.5)

    return spec, jax.tree_util.tree_map_with_path(make, decoder.abstract_params(spec, "bfloat16"))


def cut(spec: DecoderSpec, params: Any, layers: int) -> tuple[DecoderSpec, Any]:
    """The model with its first layers only."""
    return replace(spec, layers=spec.layers[:layers]), params.replace(layers=params.layers[:layers])


def shapes(s: Session, spec: DecoderSpec, batch: int, context: int) -> Shapes:
    per_row = -(-(context + ROOM) // BLOCK)
    return Shapes(
        spec=spec,
        dtype="bfloat16",
        kv_specs=decoder.kv_specs(spec, "bfloat16"),
        num_blocks=(1 + batch * per_row,),
        block_size=BLOCK,
        max_num_seqs=batch,
        max_model_len=per_row * BLOCK,
        max_logprobs=0,
        env=Env(target=s.target),
    )


def read_bytes(spec: DecoderSpec, params: Any, batch: int, context: int) -> int:
    """What a decode step has to read: all weights but the embedding's other rows, and every row's KV."""
    embed = 0 if spec.tie_embeddings else tree_bytes(params.embed)
    kv = sum(2 * layer.attention.kv_heads * layer.attention.head_dim * 2 for layer in spec.layers)
    return tree_bytes(params) - embed + batch * context * kv


def product_flops(spec: DecoderSpec, params: Any, batch: int) -> int:
    """Of the weights' products; a decode step's attention adds little."""
    embed = 0 if spec.tie_embeddings else params.embed.size
    return 2 * batch * (sum(x.size for x in jax.tree.leaves(params)) - embed)


class Decoding:
    """A decode step at one bucket: ``batch`` rows with ``context`` tokens of KV each, in a pool of their own."""

    def __init__(self, s: Session, spec: DecoderSpec, params: Any, batch: int, context: int):
        self.shapes = shapes(s, spec, batch, context)
        self.key, self.sample_key = ForwardKey(batch, batch), SampleKey(batch, GREEDY, False)
        self.batch, self.context = batch, context
        self.params = params
        self._packer = self._new_packer()
        zeros = (self.shapes.pools(), self.shapes.state())
        self.pools, self.state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
        self._steps = 0

    def _new_packer(self) -> InputPacker:
        buckets = Buckets(self.batch, self.batch)
        return InputPacker(buckets, max_num_seqs=self.batch, block_size=BLOCK, num_groups=1)

    def compile(self, options: dict[str, Any] | None = None) -> Any:
        return forward_program(self.shapes, self.key).compile(options)

    def forward(self, executable: Any) -> Any:
        """A call that runs the forward program alone, over and over on its own donated state."""
        plan = self.plan()
        # blocks are set once and for all: a step of an engine sets a few
        tables = jnp.zeros_like(self.state.tables)
        group, slot, column, block = plan.patches.T
        tables = tables.at[group, slot, column].set(block)
        carried = [self.pools, self.state.tokens, tables]
        plan.patches = plan.patches[:0]
        packed = self._packer.pack(plan).forward.copy()

        def call() -> jax.Array:
            logits, *rest, _ = executable(self.params, *carried, packed)
            carried[:] = rest
            self.pools = carried[0]
            return logits

        return call

    def plan(self) -> StepPlan:
        batch, first = self.batch, self._steps == 0
        ids = np.arange(batch, dtype=np.int32)
        position = self.context - 1 + self._steps % ROOM
        self._steps += 1
        return StepPlan(
            step_id=self._steps,
            num_decode=batch,
            slots=ids,
            handles=ids.astype(np.int64),
            keys=np.arange(batch, dtype=np.int64),
            starts=np.full(batch, position, np.int32),
            lengths=np.ones(batch, np.int32),
            samples=np.ones(batch, bool),
            token_ids=np.zeros(0, np.int32),
            target_ids=None,
            patches=self._patches() if first else np.zeros((0, 4), np.int32),
            slot_loads=[_load(slot) for slot in range(batch)] if first else [],
        )

    def _patches(self) -> np.ndarray:
        columns = self.shapes.max_model_len // BLOCK
        slot, column = np.divmod(np.arange(self.batch * columns, dtype=np.int32), columns)
        blocks = 1 + np.random.default_rng(0).permutation(self.batch * columns).astype(np.int32)
        return np.stack([np.zeros_like(slot), slot, column, blocks], axis=1)

    def executor(self, executable: Any) -> JaxExecutor:
        """The engine's own executor over these programs; takes the pools over."""
        sample = sample_program(self.shapes, self.sample_key).compile()
        patches = jax.ShapeDtypeStruct((PATCH_BATCH, 4), jnp.int32)
        tables = jax.ShapeDtypeStruct(self.state.tables.shape, jnp.int32)
        patch = Program(APPLY_PATCHES, apply_patches, (tables, patches), donate=(0,)).compile()
        programs: dict[Hashable, Any] = {self.key: executable, self.sample_key: sample, APPLY_PATCHES: patch}
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes.state())
        self._steps = 0
        return JaxExecutor(
            info=ExecutorInfo(
                kv_specs=self.shapes.kv_specs,
                num_blocks=self.shapes.num_blocks,
                block_size=BLOCK,
                max_num_seqs=self.batch,
                max_model_len=self.shapes.max_model_len,
                vocab_size=self.shapes.spec.vocab,
                max_logprobs=0,
                token_buckets=(self.batch,),
            ),
            model_info=ModelInfo(
                path="",
                model_type=self.shapes.spec.model_type,
                dtype="bfloat16",
                platform="gpu",
                device_count=1,
                config={},
                generation_config={},
            ),
            device=Device(self.params, self.pools, zeros, programs),
            packer=self._new_packer(),
            monitor=CompileMonitor(),
        )


def _load(slot: int) -> SlotLoad:
    return SlotLoad(slot, SamplingParams(temperature=0.0), 0, 0, np.zeros(0, np.int32), 0)
