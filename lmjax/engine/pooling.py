"""Requests for embeddings and scores: what they must satisfy, and how the sums that the engine sends become one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from lmjax.core.output import PromptRows
from lmjax.engine.validate import Checked, check_prompt
from lmjax.protocol import EngineInfo, Pooled, PoolingInfo
from lmjax.text.pairs import encode_text
from lmjax.types import ParameterError, PoolingParams, RequestUpdate, SamplingParams

_NOTHING_DRAWN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class PoolSink:
    """Adds up a request's sums as they come; those before a new beginning are void (see ``core.output.PromptRows``)."""

    after, entropy = -1, False

    def __init__(self, num_tokens: int, info: PoolingInfo, params: PoolingParams, split: int):
        self.pooling, self.split = info.kind, split
        self._info, self._params = info, params
        self._count = num_tokens if info.kind == "mean" and info.task == "embed" else 1
        self._first = num_tokens - 1 if info.kind == "last" else 0
        self._sum: np.ndarray | None = None

    def add(self, found: PromptRows) -> None:
        values = np.frombuffer(found.rows, "<f4")
        self._sum = values if self._sum is None or found.first == self._first else self._sum + values

    def values(self) -> np.ndarray:
        """float32 [D] or [dimensions]: the embedding; [1]: the score. Raises ``RuntimeError`` for what is no number."""
        assert self._sum is not None, "nothing came"
        if not np.isfinite(self._sum).all():
            raise RuntimeError("the model's result is not finite: its weights, or an adapter's, overflow")
        activate = self._info.normalize if self._params.use_activation is None else self._params.use_activation
        if self._info.task == "score":
            values = self._sum.astype(np.float64)
            return np.asarray(1 / (1 + np.exp(-values)) if activate else values, np.float32)
        mean = self._sum[: self._params.dimensions] / np.float32(self._count)
        return mean / np.maximum(np.linalg.norm(mean), np.float32(1e-12)) if activate else mean


def check_pooling(ids: Sequence[int], params: PoolingParams, info: EngineInfo, split: int = 0) -> Checked:
    """A request that can run; ``ids`` are cut already. Raises ``ParameterError``."""
    pooling = pooling_of(info)
    check_prompt(ids, info)
    limit = info.max_model_len
    if info.num_kv_blocks:
        limit = min(limit, info.num_kv_blocks * info.block_size)
    if len(ids) > limit:
        raise ParameterError("prompt", f"has {len(ids)} tokens, but the model's context length is {limit} tokens")
    check_dimensions(params.dimensions, pooling)
    return Checked(list(ids), _NOTHING_DRAWN, (), None, PoolSink(len(ids), pooling, params, split))


def pooling_of(info: EngineInfo) -> PoolingInfo:
    if info.pooling is None:
        raise ParameterError("model", "this engine cannot embed")
    return info.pooling


def check_dimensions(dimensions: int | None, pooling: PoolingInfo) -> None:
    if dimensions is None:
        return
    if pooling.task == "score":
        raise ParameterError("dimensions", f"got {dimensions}, but the model gives scores, not embeddings")
    if pooling.dimensions is None:
        if dimensions != pooling.width:
            raise ParameterError(
                "dimensions",
                f"got {dimensions}, must be {pooling.width} or absent: the model was not trained for shorter ones "
                "(Matryoshka); if it was, say so with --hf-overrides '{\"is_matryoshka\": true}'",
            )
    elif pooling.dimensions and dimensions not in pooling.dimensions:
        raise ParameterError(
            "dimensions", f"got {dimensions}, must be one of {', '.join(map(str, pooling.dimensions))}"
        )
    elif dimensions > pooling.width:
        raise ParameterError("dimensions", f"got {dimensions}, must be at most {pooling.width}")


def encode_input(
    tokenizer: Any,
    text: str | Sequence[int],
    params: PoolingParams,
    info: EngineInfo,
    second: str | None = None,
    add_special_tokens: bool = True,
) -> tuple[list[int], int]:
    """Token ids, cut if asked, and where the second text begins. Raises ``ParameterError``."""
    keep, pooling = params.truncate_prompt_tokens, pooling_of(info)
    if keep is not None and keep > info.max_model_len:
        raise ParameterError(
            "truncate_prompt_tokens",
            f"got {keep}, must be at most the context length of {info.max_model_len} tokens",
        )
    keep = info.max_model_len if keep == -1 else keep
    if not isinstance(text, str):
        ids = list(text)
        return ids[:keep], 0
    return encode_text(tokenizer, text, second, keep=keep, lower=pooling.lower, add_special_tokens=add_special_tokens)


def prepare(
    tokenizer: Any,
    info: EngineInfo,
    text: str | list[int],
    params: PoolingParams,
    second: str | None,
    add_special_tokens: bool,
) -> tuple[list[int], int]:
    """See ``EngineClient.pooling_prompt``."""
    ids, split = encode_input(tokenizer, text, params, info, second, add_special_tokens)
    check_pooling(ids, params, info, split)
    return ids, split


async def pooled(checked: Checked, updates: AsyncGenerator[RequestUpdate]) -> Pooled:
    """Waits for a request's end; closing ``updates`` aborts it. Raises what the engine says is wrong."""
    last: RequestUpdate | None = None
    async with aclosing(updates):
        async for update in updates:
            last = update
            if update.error is not None:
                # a dead engine raises with the next one
                async for _ in updates:
                    pass
                raise RuntimeError(update.error)
    assert last is not None and last.metrics is not None
    return Pooled(
        checked.sink.values().tobytes(), last.num_prompt_tokens, last.num_cached_tokens, last.metrics, last.engine
    )
