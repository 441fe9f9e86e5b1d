"""What a served form of a model makes of a prompt, layer by layer, against another form of it (``lmjax verify``).

Both go through the model together, a layer at a time: of each there is one layer's KV pool and one hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.models import decoder
from lmjax.models.params import DecoderParams
from lmjax.models.spec import DecoderSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import Env


@dataclass(frozen=True)
class Side:
    """One form of a model. ``steps``: how many tokens of the prompt are in each step; a step of one token behind others
    is a decode step. ``widths``: the shapes that steps are padded to, ascending."""

    params: DecoderParams
    spec: DecoderSpec
    env: Env
    device: jax.Device
    kv_dtype: str
    block_size: int
    steps: tuple[int, ...]
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    name: str
    max_abs_error: float
    relative_rms: float  # of a token: RMS of the difference over RMS of the reference; this is the RMS over all tokens


@dataclass(frozen=True)
class Errors:
    """Of hidden states (embedding, after each layer, after the last norm) and logits, over all tokens of the prompt.
    ``agreeing``: tokens after which both forms hold the same token for the most likely one."""

    rows: tuple[Row, ...]
    num_tokens: int
    agreeing: int


def measure(served: Side, reference: Side, token_ids: Sequence[int]) -> Errors:
    """token_ids: the prompt, within the vocabulary and the context length of both."""
    walks = [_Walk(side, np.asarray(token_ids, np.int32)) for side in (served, reference)]
    rows = [_compare("embedding", *(walk.hidden() for walk in walks))]
    for i in range(len(served.spec.layers)):
        for walk in walks:
            walk.pass_layer(i)
        rows.append(_compare(f"layer {i}", *(walk.hidden() for walk in walks)))
    for walk in walks:
        walk.pass_norm()
    rows.append(_compare("final norm", *(walk.hidden() for walk in walks)))
    logits = [walk.logits() for walk in walks]
    rows.append(_compare("logits", *logits))
    agreeing = int((logits[0].argmax(0) == logits[1].argmax(0)).sum())
    return Errors(tuple(rows), len(token_ids), agreeing)


def _compare(name: str, found: np.ndarray, wanted: np.ndarray) -> Row:
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    difference = found - wanted
    # token by token: the first has features thousands of times as large as the others', which would hide their errors
    squares, sizes = (np.mean(np.square(x), axis=0) for x in (difference, wanted))
    with np.errstate(divide="ignore", invalid="ignore"):
        # where the reference is nothing but zeros any difference is infinitely large
        relative = np.where(squares == 0, 0.0, squares / sizes)
    return Row(name, float(np.abs(difference).max()), float(np.sqrt(np.mean(relative))))


class _Walk:
    """The hidden states of one side on their way through the layers."""

    def __init__(self, side: Side, token_ids: np.ndarray):
        self.side = side
        self.batches = _batches(side, token_ids)
        with self._here():
            # a step's padding is of the null token; its columns mean nothing
            self.x = [
                _embed(side.params, batch.token_ids, batch.positions, spec=side.spec, env=side.env)
                for batch in self.batches
            ]

    def _here(self) -> Any:
        return jax.default_device(self.side.device)

    def hidden(self) -> np.ndarray:
        """float32 [D, tokens]."""
        parts = [np.asarray(x, np.float32)[:, :n] for x, n in zip(self.x, self.side.steps, strict=True)]
        return np.concatenate(parts, axis=1)

    def pass_layer(self, i: int) -> None:
        side = self.side
        layer = side.spec.layers[i]
        alone = replace(layer, attention=replace(layer.attention, group=0, index=0))
        spec = replace(side.spec, layers=(alone,))
        [kv] = decoder.kv_specs(spec, side.kv_dtype)
        columns = self.batches[0].block_tables.shape[2]
        with self._here():
            abstract = decoder.abstract_pool(kv, columns + 1, side.block_size)
            pools: Any = (jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract),)
            for step, batch in enumerate(self.batches):
                self.x[step], pools = _layer(side.params.layers[i], self.x[step], pools, batch, spec=spec, env=side.env)

    def pass_norm(self) -> None:
        side = self.side
        with self._here():
            self.x = [_norm(side.params, x, spec=side.spec) for x in self.x]

    def logits(self) -> np.ndarray:
        """float32 [V, tokens]."""
        side = self.side
        with self._here():
            found = [_logits(side.params, x, spec=side.spec, env=side.env) for x in self.x]
        return np.concatenate([np.asarray(x)[:, :n] for x, n in zip(found, side.steps, strict=True)], axis=1)


@partial(jax.jit, static_argnames=("spec", "env"), donate_argnums=2)
def _layer(layer: Any, x: jax.Array, pools: Any, batch: Batch, *, spec: DecoderSpec, env: Env) -> tuple[jax.Array, Any]:
    return decoder.run_layers((layer,), spec, x, pools, batch, env)


@partial(jax.jit, static_argnames=("spec", "env"))
def _embed(
    params: DecoderParams, token_ids: jax.Array, positions: jax.Array, *, spec: DecoderSpec, env: Env
) -> jax.Array:
    return decoder.embed(params, spec, token_ids, positions, env)


@partial(jax.jit, static_argnames="spec")
def _norm(params: DecoderParams, x: jax.Array, *, spec: DecoderSpec) -> jax.Array:
    return decoder.final_norm(params, spec, x)


@partial(jax.jit, static_argnames=("spec", "env"))
def _logits(params: DecoderParams, x: jax.Array, *, spec: DecoderSpec, env: Env) -> jax.Array:
    return decoder.logits(params, spec, x, env)


def _batches(side: Side, token_ids: np.ndarray) -> list[Batch]:
    columns = -(-len(token_ids) // side.block_size)
    table = 1 + np.arange(columns, dtype=np.int32).reshape(1, 1, columns)
    batches, start = [], 0
    for count in side.steps:
        width = next(width for width in side.widths if width >= count)
        decode = count == 1 and start > 0
        ids, positions = np.zeros(width, np.int32), np.zeros(width, np.int32)
        ids[:count] = token_ids[start : start + count]
        positions[:count] = np.arange(start, start + count)
        fields: dict[str, Any] = {
            "token_ids": ids,
            "positions": positions,
            "token_rows": np.zeros(width, np.int32),
            "block_tables": table,
            "query_starts": np.zeros(1, np.int32),
            "query_lens": np.full(1, count, np.int32),
            "context_lens": np.full(1, start + count, np.int32),
            "logit_tokens": np.full(1, count - 1, np.int32),
            "num_decode": np.int32(decode),
            "num_rows": np.int32(1),
            "num_tokens": np.int32(count),
        }
        batches.append(Batch(**fields))
        start += count
    assert start == len(token_ids), (side.steps, len(token_ids))
    return [jax.tree.map(partial(jax.device_put, device=side.device), batch) for batch in batches]
