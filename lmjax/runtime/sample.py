"""The sample program: logits -> one token a row, written into the token table and into one packed result."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.core.plan import StepResult
from lmjax.runtime.buckets import SampleKey
from lmjax.runtime.forward import pack_logprobs
from lmjax.runtime.inputs import sample_layout
from lmjax.sampling.sampler import sample as draw

SampleProgram = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def make_sample(key: SampleKey, max_logprobs: int) -> SampleProgram:
    """``(logits [V, S], tokens, sampling state, packed) -> (tokens, result)``; donate tokens.

    result: int32 [S, 1], or [S, 3 + 2 * max_logprobs] with log-probabilities (the token, then as ``pack_logprobs``).
    """

    def sample(
        logits: jax.Array, tokens: jax.Array, sampling: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        parts = sample_layout(key.num_rows).split(packed)
        slots, positions = parts["slots"], parts["positions"]
        out = draw(
            logits,
            parts["params"],
            slots,
            positions,
            tokens,
            sampling,
            level=key.level,
            # 0 means none to the sampler; a request may want its token's own log-probability where no more is allowed
            max_logprobs=max(max_logprobs, 1) if key.logprobs else 0,
        )
        tokens = tokens.at[slots, positions].set(out.token_ids, mode="promise_in_bounds")
        result = out.token_ids[:, None]
        if key.logprobs:
            assert out.logprobs is not None and out.ranks is not None
            assert out.top_ids is not None and out.top_logprobs is not None
            top_ids, top_logprobs = out.top_ids[:, :max_logprobs], out.top_logprobs[:, :max_logprobs]
            logprobs = pack_logprobs(out.logprobs, out.ranks, top_ids, top_logprobs)
            result = jnp.concatenate([result, logprobs], axis=1)
        return tokens, result

    return sample


def unpack_result(result: np.ndarray, samples: np.ndarray, wants_logprobs: bool) -> StepResult:
    """result: int32 [S, columns] as the program packed it; samples: bool [R], R <= S.

    The log-probabilities are left out where nobody asked for them: the program may have no form without.
    """
    num_rows = len(samples)
    token_ids = np.where(samples, result[:num_rows, 0], np.int32(-1))
    if not wants_logprobs:
        return StepResult(token_ids)
    return StepResult(token_ids, *unpack_logprobs(result[:num_rows, 1:]))


def unpack_logprobs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """int32 [n, 2 + 2 k] -> log-probabilities [n], ranks [n], top ids [n, k], top log-probabilities [n, k]; copies."""
    packed = np.array(packed)
    k = (packed.shape[1] - 2) // 2
    floats = packed.view(np.float32)
    return floats[:, 0].copy(), packed[:, 1].copy(), packed[:, 2 : 2 + k].copy(), floats[:, 2 + k :].copy()
