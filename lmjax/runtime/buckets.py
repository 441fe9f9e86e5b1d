"""The closed set of program shapes: which forward and sample programs exist, and which one a step uses."""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal

from lmjax.core.plan import StepPlan

SMALL_TOKENS = (1, 4, 8, 16, 32, 64)  # a step costs what its width costs; below 4 that is reading the weights
MIXED_TOKENS = (128, 256, 512, 2048, 8192)  # prefill fills a step to the edge of its bucket: these may be farther apart
GREEDY, RANDOM, FILTERED, FULL = range(4)  # feature levels of lmjax.sampling
# (level, log-probabilities) of the sample programs. What is not here runs on the last one, which draws the same tokens:
# on a CPU its filters and penalties are skipped where no row asks for them, and every further program costs seconds at
# start.
SAMPLERS = ((GREEDY, False), (GREEDY, True), (FULL, True))
# On a card nothing is skipped (see sampler.sample), so rows without filters and penalties have a program without any.
GPU_SAMPLERS = ((GREEDY, False), (RANDOM, False), (GREEDY, True), (FULL, True))
Samplers = tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """A forward program: room for ``num_tokens`` (T) tokens of ``num_rows`` (S) sequences."""

    num_tokens: int
    num_rows: int
    prompt_logprobs: bool = False
    processed: bool = False  # of the distributions after temperature and filters
    pooled: bool = False  # hidden states are summed, and there are no logits
    adapters: bool = False  # rows may have LoRA adapters

    @property
    def name(self) -> str:
        kind = (",processed" if self.processed else "") + (",prompt_logprobs" if self.prompt_logprobs else "")
        kind += (",pooled" if self.pooled else "") + (",adapters" if self.adapters else "")
        return f"forward[{self.num_tokens},{self.num_rows}{kind}]"


@dataclass(frozen=True, slots=True)
class SampleKey:
    """A sample program: ``num_rows`` (S) rows, sampling features up to ``level``, with log-probabilities or without."""

    num_rows: int
    level: int
    logprobs: bool

    @property
    def name(self) -> str:
        return f"sample[{self.num_rows},{self.level}{',logprobs' if self.logprobs else ''}]"


class Buckets:
    """All program keys for the given limits.

    Token buckets are 1, 4, 8 ... 64 and then 128, 256, 512, 2048, 8192, each below ``max_num_batched_tokens``, which is
    the last one. Where ``max_num_seqs`` is above 64, powers of two go on up to it, so that a step of decode rows
    alone never pays for twice its tokens. A bucket has as many rows as tokens, at most ``max_num_seqs``. With
    ``multiple`` and ``least`` both are rounded up to multiples of it that are no smaller. ``pooled``: nothing is
    generated: all programs pool, none samples. Else the one for prompt log-probabilities pools, too. ``adapters``:
    every forward program has a second form, for steps in which a row has an adapter; "always": all steps run on it.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        samplers: Samplers = SAMPLERS,
        processed_logprobs: bool = False,
        multiple: int = 1,
        least: int = 1,
        pooled: bool = False,
        adapters: bool | Literal["always"] = False,
    ):
        self._samplers = samplers
        self._pooled = pooled
        budget = max_num_batched_tokens
        decode = [2**i for i in range(7, 32) if 2**i < max_num_seqs] + [max_num_seqs]
        tokens = {*SMALL_TOKENS, *decode, *(t for t in MIXED_TOKENS if t > max_num_seqs), budget}

        def rounded(n: int) -> int:
            return max(-(-n // multiple) * multiple, least)

        self.token_buckets = tuple(sorted({rounded(t) for t in tokens if t <= budget}))
        most_rows = rounded(max_num_seqs)
        always = adapters == "always"
        keys = [ForwardKey(t, min(t, most_rows), pooled=pooled, adapters=always) for t in self.token_buckets]
        self.forward, last = tuple(keys), keys[-1]
        # what a step with targets runs on
        self.prompt_logprobs = last if pooled else replace(last, prompt_logprobs=True, processed=processed_logprobs)
        self._second_form = bool(adapters) and not always
        self.row_buckets = tuple(sorted({key.num_rows for key in self.forward}))
        self.sample = tuple(
            SampleKey(rows, level, logprobs)
            for rows in self.row_buckets
            for level, logprobs in (() if pooled else samplers)
        )

    @property
    def every_forward(self) -> tuple[ForwardKey, ...]:
        """All forward keys, each once, in both forms."""
        keys = dict.fromkeys((*self.forward, self.prompt_logprobs))
        more = (replace(key, adapters=True) for key in keys) if self._second_form else ()
        return (*keys, *more)

    def choose(self, plan: StepPlan) -> ForwardKey:
        """The smallest program with room for the plan's tokens; ``ValueError`` where none has."""
        tokens, rows = plan.num_tokens, plan.num_rows
        fitting = self.forward[bisect_left(self.token_buckets, tokens) :]
        for key in fitting if plan.target_ids is None or self._pooled else (self.prompt_logprobs,):
            if tokens <= key.num_tokens and rows <= key.num_rows:
                return replace(key, adapters=True) if plan.adapters is not None else key
        largest = self.forward[-1]
        raise ValueError(
            f"a step of {tokens} tokens in {rows} rows does not fit the largest program "
            f"({largest.num_tokens} tokens, {largest.num_rows} rows)"
        )

    @functools.cache  # noqa: B019 (as many entries as programs, and buckets live as long as the engine)
    def sample_key(self, num_rows: int, level: int, logprobs: bool) -> SampleKey:
        """The program for rows that need at most ``level``; ``num_rows`` is that of the forward program."""
        return SampleKey(num_rows, *next(s for s in self._samplers if s[0] >= level and s[1] >= logprobs))
