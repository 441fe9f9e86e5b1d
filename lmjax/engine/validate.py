"""What a request must satisfy on this very engine, checked before it is queued. Every error names the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lmjax.protocol import EngineInfo
from lmjax.text.objects import NEEDS
from lmjax.text.words import bad_words_ids
from lmjax.types import ParameterError, SamplingParams


class Checked(NamedTuple):
    """A request that can run: ``params.max_tokens`` is set and nothing is left to truncate."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]  # ends of sequence (unless ignored) and stop_token_ids, each once
    bad_words_ids: list[list[int]] | None
    sink: Any = None  # of tokens to score or to pool: engine.scoring.ScoreSink, engine.pooling.PoolSink


def check_request(prompt: Sequence[int], params: SamplingParams, info: EngineInfo, tokenizer: Any) -> Checked:
    """Raises ``ParameterError`` if the request could never run or asks for what the engine does not give."""
    check_generates(info)
    check_prompt(prompt, info)
    ids = _truncate(list(prompt), params, info)
    max_tokens = _max_tokens(len(ids), params, info)
    if params.min_tokens > max_tokens:
        raise ParameterError("min_tokens", f"got {params.min_tokens}, must be at most max_tokens ({max_tokens})")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > info.max_logprobs:
            raise ParameterError(name, f"got {value}, must be at most {info.max_logprobs} (--max-logprobs)")
    if params.prompt_logprobs is not None and info.logprobs_mode != "raw_logprobs":
        check_filters("prompt_logprobs", params)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and not tokenizer.vocab_size:
            raise ParameterError(name, f"got {getattr(params, name)!r}, but {NEEDS}")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_ids(name, getattr(params, name) or (), info)
    stop_ids = params.stop_token_ids if params.ignore_eos else [*info.eos_token_ids, *params.stop_token_ids]
    resolved = dataclasses.replace(params, max_tokens=max_tokens, truncate_prompt_tokens=None)
    bad_words = bad_words_ids(tokenizer, params.bad_words) if params.bad_words else None
    return Checked(ids, resolved, tuple(dict.fromkeys(stop_ids)), bad_words)


def check_generates(info: EngineInfo) -> None:
    if not info.generates:
        raise ParameterError("model", f"{info.model} gives embeddings or scores and no answers (--runner pooling)")


def check_priority(priority: int, policy: str) -> None:
    """A priority that would change nothing is refused."""
    if priority and policy != "priority":
        raise ParameterError("priority", f"got {priority}, but only --scheduling-policy priority looks at it")


def check_filters(name: str, params: SamplingParams) -> None:
    """What a distribution at every position of a known text can follow: temperature and filters. The rest depends on
    what was generated before."""
    fixed = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    set_ones = [field for field, off in fixed.items() if getattr(params, field) != off]
    set_ones += [f for f in ("logit_bias", "allowed_token_ids", "bad_words") if getattr(params, f) is not None]
    if set_ones:
        raise ParameterError(
            name,
            f"processed log-probabilities of given tokens follow temperature, top_k, top_p and min_p alone; "
            f"{', '.join(set_ones)} cannot be applied to them",
        )


def check_prompt(prompt: Sequence[int] | np.ndarray, info: EngineInfo, field: str = "prompt") -> None:
    if len(prompt) == 0:
        raise ParameterError(field, "is empty, must have at least one token")
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):
        ids = np.asarray(0.0)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ParameterError(field, "must be a list of token ids (integers)")
    for bad in (int(ids.min()), int(ids.max())):
        if not 0 <= bad < info.vocab_size:
            raise ParameterError(field, f"got the token id {bad}, must be at least 0 and below {info.vocab_size}")


def _truncate(prompt: list[int], params: SamplingParams, info: EngineInfo) -> list[int]:
    keep = params.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(1, info.max_model_len - (params.max_tokens or 1))
    return prompt[-keep:]


def _max_tokens(num_prompt: int, params: SamplingParams, info: EngineInfo) -> int:
    """The number of tokens to generate at most: what was asked for, or else the rest of the context."""
    limit = info.max_model_len
    if num_prompt >= limit:
        raise ParameterError(
            "prompt",
            f"has {num_prompt} tokens, but the model's context length is {limit} tokens, "
            f"so a prompt may have at most {limit - 1}",
        )
    # the last generated token is never written to the KV cache
    capacity = info.num_kv_blocks * info.block_size + 1
    if num_prompt >= capacity:
        raise ParameterError(
            "prompt", f"has {num_prompt} tokens, more than the whole KV cache holds ({capacity - 1} tokens)"
        )
    if params.max_tokens is None:
        return min(limit, capacity) - num_prompt
    total = num_prompt + params.max_tokens
    if total > limit:
        raise ParameterError(
            "max_tokens",
            f"the model's context length is {limit} tokens, but {total} were asked for "
            f"({num_prompt} in the prompt, {params.max_tokens} to generate)",
        )
    if total > capacity:
        raise ParameterError(
            "max_tokens",
            f"the KV cache holds {capacity - 1} tokens, but {total} were asked for "
            f"({num_prompt} in the prompt, {params.max_tokens} to generate)",
        )
    return params.max_tokens


def _check_ids(name: str, ids: Any, info: EngineInfo) -> None:
    for token in ids:
        if token >= info.vocab_size:
            raise ParameterError(name, f"got the token id {token}, must be below {info.vocab_size}")
