"""Random requests over every sampling feature, and a run of them through a scheduler and the JAX executor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lmjax.config import SchedulerConfig
from lmjax.core.plan import ExecutorInfo, HostTierInfo, StepPlan, StepResult
from lmjax.core.request import NewRequest
from lmjax.runtime.executor import JaxExecutor
from lmjax.types import SamplingParams
from tests.runtime.tiny import VOCAB


def random_params(rng: np.random.Generator, longest: int) -> dict[str, Any]:
    """Each feature now and then, so that all levels and most mixtures occur."""

    def maybe(chance: float, value: Any, otherwise: Any = None) -> Any:
        return value if rng.random() < chance else otherwise

    def ids(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    max_tokens = int(rng.integers(1, longest))
    return {
        "n": int(maybe(0.15, rng.integers(2, 5), 1)),
        "temperature": float(maybe(0.5, rng.choice([0.3, 0.8, 1.0, 1.5]), 0.0)),
        "top_p": maybe(0.2, 0.9, 1.0),
        "top_k": maybe(0.2, int(rng.integers(1, 20)), 0),
        "min_p": maybe(0.1, 0.05, 0.0),
        "seed": maybe(0.5, int(rng.integers(2**40))),
        "presence_penalty": maybe(0.1, 0.7, 0.0),
        "frequency_penalty": maybe(0.1, 0.5, 0.0),
        "repetition_penalty": maybe(0.1, 1.3, 1.0),
        "logit_bias": maybe(0.1, {i: float(rng.normal()) * 5 for i in ids(80)}),
        "allowed_token_ids": maybe(0.05, ids(40)),
        "max_tokens": max_tokens,
        "min_tokens": maybe(0.3, int(rng.integers(0, max_tokens + 1)), 0),
        "logprobs": maybe(0.25, int(rng.integers(0, 6))),
        "prompt_logprobs": maybe(0.15, int(rng.integers(0, 6))),
    }


def random_requests(count: int, seed: int = 0, longest: int = 24) -> list[NewRequest]:
    """Half of the prompts share one of three prefixes. Handles are unique over all choices."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, VOCAB, size) for size in (5, 12, 33)]
    requests, handle = [], 0
    for _ in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 20)))
        if rng.random() < 0.5:
            prompt = np.concatenate((prefixes[rng.integers(3)], prompt))
        params = SamplingParams(**random_params(rng, longest))
        stop_ids = tuple(rng.choice(VOCAB, int(rng.choice([0, 2, 12])), replace=False).tolist())
        bad_words = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 4, 3)]
        bad_words_ids = bad_words if rng.random() < 0.1 else None
        requests.append(NewRequest(handle, prompt.astype(np.int32), params, stop_ids, bad_words_ids))
        handle += params.n
    return requests


@dataclass
class Limited:
    """An executor seen through a smaller pool, fewer slots and without its host tier, so that one set of programs
    serves many tests."""

    executor: JaxExecutor
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    host: HostTierInfo | bool = True  # False: none; or with other costs
    errors: list[str] = field(default_factory=list)
    plans: int = 0
    mutate: bool = False  # overwrite every packed buffer as soon as its step was collected

    @property
    def info(self) -> ExecutorInfo:
        info = self.executor.info
        blocks = info.num_blocks if self.num_blocks is None else (self.num_blocks,) * len(info.num_blocks)
        host = info.host if self.host is True else self.host or None
        return replace(info, num_blocks=blocks, max_num_seqs=self.max_num_seqs or info.max_num_seqs, host=host)

    def submit(self, plan: StepPlan) -> Any:
        self.plans += 1
        return self.executor.submit(plan)

    def collect(self, in_flight: Any) -> StepResult:
        result = self.executor.collect(in_flight)
        if self.mutate:
            for call in in_flight.calls:
                call.packed[:] = 0x7ABCDEF
        return result


def scheduler_config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_batched_tokens": 32, **changes})
