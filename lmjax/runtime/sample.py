"""The sample program: logits -> one token a row, written into the token table and into one packed result."""

from __future__ import annotations

from collections.abc import Callable

import jax

from lmjax.runtime.buckets import SampleKey
from lmjax.runtime.forward import pack_logprobs
from lmjax.runtime.inputs import sample_layout
from lmjax.sampling.logprobs import Logprobs
from lmjax.sampling.sampler import sample as draw
from lmjax.sampling.share import Share

SampleProgram = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def make_sample(
    key: SampleKey,
    max_logprobs: int,
    vocab: int,
    axis: str | tuple[str, ...] | None = None,
    branches: bool = True,
    processed_logprobs: bool = False,
) -> SampleProgram:
    """``(logits [V, S], tokens, sampling state, packed) -> (tokens, result)``; donate tokens.

    Rows of the logits beyond ``vocab`` are padding. With a mesh ``axis`` logits are one device's rows [V_local, S], and
    ``Placement.wrap_sample`` makes one function of all. ``branches``: as of ``sampler.sample``; not for a GPU.

    result: token rows, int32 [S, 1], or [S, 3 + 2 * max_logprobs] with log-probabilities.
    """

    def sample(
        logits: jax.Array, tokens: jax.Array, sampling: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        parts = sample_layout(key.num_rows).split(packed)
        slots, positions = parts["slots"], parts["positions"]
        out = draw(
            logits[:vocab] if axis is None else logits,
            parts["params"],
            slots,
            positions,
            tokens,
            sampling,
            level=key.level,
            # 0 means none to the sampler; a request may want its token's own log-probability where no more is allowed
            max_logprobs=max(max_logprobs, 1) if key.logprobs else 0,
            share=Share(axis, vocab),
            branches=branches,
            processed_logprobs=processed_logprobs,
        )
        tokens = tokens.at[slots, positions].set(out.token_ids, mode="promise_in_bounds")
        result = out.token_ids[:, None]
        if key.logprobs:
            assert out.logprobs is not None and out.ranks is not None
            assert out.top_ids is not None and out.top_logprobs is not None
            top = out.top_ids[:, :max_logprobs], out.top_logprobs[:, :max_logprobs]
            result = pack_logprobs(out.token_ids, Logprobs(out.logprobs, out.ranks, *top))
        return tokens, result

    return sample
