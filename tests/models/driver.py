"""Drives ``decoder.forward`` by hand: block tables, ragged batches and chunks, without scheduler or runtime."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.models import decoder
from lmjax.models.names import hf_names
from lmjax.models.params import DecoderParams, abstract_params, map_named
from lmjax.models.spec import DecoderSpec
from lmjax.nn.batch import Batch


def params_from(tensors: dict[str, np.ndarray], spec: DecoderSpec, dtype: str = "float32") -> DecoderParams:
    """The parameter tree of a Hugging Face checkpoint's tensors."""
    names = hf_names(spec)

    def make(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.full(leaf.shape, np.nan, np.float32)
        for part in names[name]:
            part.fill(values, tensors[part.name])
        return jnp.asarray(values.astype(leaf.dtype))

    return map_named(make, abstract_params(spec, dtype))


# LLVM's optimiser would take most of the tests' time and change nothing for programs this small
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2, compiler_options=COMPILER_OPTIONS)
def _run(params: DecoderParams, spec: DecoderSpec, pools: tuple, batch: Batch) -> tuple[jax.Array, tuple]:
    hidden, pools = decoder.forward(params, spec, pools, batch)
    return decoder.logits(params, spec, hidden), pools


class Driver:
    """Sequences over NaN-filled pools. Blocks are handed out in random order; a window group's blocks behind the
    window are freed and reused, their table entries point to the null block."""

    def __init__(
        self,
        params: DecoderParams,
        spec: DecoderSpec,
        *,
        num_blocks: int = 60,
        block_size: int = 4,
        tokens: int = 96,  # T of every step
        rows: int = 4,  # S of every step
        width: int = 32,  # P
        dtype: str = "float32",  # of the pools
        seed: int = 0,
    ):
        self.params, self.spec, self.block_size = params, spec, block_size
        self.tokens, self.rows, self.width = tokens, rows, width
        self.kv_specs = decoder.kv_specs(spec, dtype)
        self.pools: Any = jax.tree.map(
            lambda leaf: jnp.full(leaf.shape, 77 if leaf.dtype == jnp.int8 else jnp.nan, leaf.dtype),
            tuple(decoder.abstract_pool(kv, num_blocks, block_size) for kv in self.kv_specs),
        )
        rng = np.random.default_rng(seed)
        self.free = [list(1 + rng.permutation(num_blocks - 1)) for _ in self.kv_specs]
        self.tables: dict[Any, np.ndarray] = {}
        self.lengths: dict[Any, int] = {}

    def step(self, work: dict[Any, Sequence[int]]) -> dict[Any, np.ndarray]:
        """Append tokens to sequences; gives float32 logits [tokens, V] of each. One-token sequences that have a past
        go first, as decode rows."""
        decode = [key for key, ids in work.items() if len(ids) == 1 and self.lengths.get(key, 0)]
        order = decode + [key for key in work if key not in decode]
        out, self.pools = self._run(self.batch_of(work, order, len(decode)))
        columns = np.asarray(out).T
        result, at = {}, 0
        for key in order:
            result[key] = columns[at : at + len(work[key])]
            at += len(work[key])
            self._free_behind_window(key)
        return result

    def batch_of(self, work: dict[Any, Sequence[int]], order: list[Any] | None = None, num_decode: int = 0) -> Batch:
        """The batch of a step, for which blocks are taken."""
        order = list(work) if order is None else order
        for key in order:
            self._extend(key, len(work[key]))
        return self._batch(work, order, num_decode)

    def _run(self, batch: Batch) -> tuple[Any, Any]:
        return _run(self.params, self.spec, self.pools, batch)

    def _extend(self, key: Any, count: int) -> None:
        table = self.tables.setdefault(key, np.zeros((len(self.kv_specs), self.width), np.int32))
        old = self.lengths.get(key, 0)
        self.lengths[key] = old + count
        for group, free in enumerate(self.free):
            for column in range(-(-old // self.block_size), -(-(old + count) // self.block_size)):
                table[group, column] = free.pop()

    def _free_behind_window(self, key: Any) -> None:
        for group, kv in enumerate(self.kv_specs):
            if kv.window is not None:
                for column in range(max(0, self.lengths[key] - kv.window + 1) // self.block_size):
                    if block := int(self.tables[key][group, column]):
                        self.free[group].append(block)
                        self.tables[key][group, column] = 0

    def _batch(self, work: dict[Any, Sequence[int]], order: list[Any], num_decode: int) -> Batch:
        ids, positions, token_rows = (np.zeros(self.tokens, np.int32) for _ in range(3))
        starts, lens, contexts, last = (np.zeros(self.rows, np.int32) for _ in range(4))
        tables = np.zeros((len(self.kv_specs), self.rows, self.width), np.int32)
        at = 0
        for row, key in enumerate(order):
            count, context = len(work[key]), self.lengths[key]
            ids[at : at + count] = work[key]
            positions[at : at + count] = np.arange(context - count, context)
            token_rows[at : at + count] = row
            starts[row], lens[row], contexts[row], last[row] = at, count, context, at + count - 1
            tables[:, row] = self.tables[key]
            at += count
        return Batch(
            token_ids=ids,
            positions=positions,
            token_rows=token_rows,
            block_tables=tables,
            query_starts=starts,
            query_lens=lens,
            context_lens=contexts,
            logit_tokens=last,
            num_decode=np.int32(num_decode),
            num_rows=np.int32(len(order)),
            num_tokens=np.int32(at),
        )
