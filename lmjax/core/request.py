"""A request inside the core: what came in, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from lmjax.core.host_tier import Saved
from lmjax.types import SamplingParams


@dataclass(slots=True)
class NewRequest:
    """What ``Scheduler.add`` takes. Choice ``i`` of ``params.n`` has the handle ``handle + i``.

    ``prompt``: int32 [n], not empty, not changed afterwards. ``stop_ids``: eos (unless ignored) and stop_token_ids.
    ``params.max_tokens``: None means up to the context length. ``adapter``: number of the LoRA adapter, 0 for
    none; it keeps KV of adapters apart.
    ``after``: a token after the prompt whose log-probability is wanted with those of the prompt (with
    ``params.prompt_logprobs``); -1: none. ``entropy``: those of the distributions are wanted, too.
    ``pooling``: last, mean or cls: wanted are hidden states of the prompt and nothing is drawn; empty: it generates.
    ``split``: where the second text of a pair begins (encoders; 0: there is none).
    ``arrival``: seconds of time.monotonic(); orders the waiting requests (ties: order of the calls of ``add``).
    """

    handle: int
    prompt: np.ndarray
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: list[list[int]] | None = None
    priority: int = 0
    cache_salt: str | None = None
    adapter: int = 0
    arrival: float = 0.0
    after: int = -1
    entropy: bool = False
    pooling: str = ""
    split: int = 0


class State(IntEnum):
    """``HELD``: a choice that waits for its leader's prefill. ``PARKED``: its last token is on the device, but
    slot and blocks were taken away already."""

    WAITING = 0
    RUNNING = 1
    HELD = 2
    PARKED = 3
    FINISHED = 4


@dataclass(slots=True, eq=False)
class Request:
    """One choice of a request. Numbers that change with every token live in ``SlotTable``, not here."""

    handle: int
    index: int  # which of the n choices
    prompt: np.ndarray  # int32 [num_prompt]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    bad_words_ids: list[list[int]] | None
    rank: tuple[int, float, int]  # place in the waiting order: lower goes first, the highest is preempted first
    seed: int
    limit: int  # most tokens, prompt included
    root: bytes  # parent digest of the first block
    history: np.ndarray  # int32: every token known; brought up to date when the slot is given up
    state: State = State.WAITING
    slot: int = -1
    epoch: int = 0
    pending: int = 0  # tokens drawn for it on the device and not yet read; kept only while it has no slot
    ticket: int = -1  # of its live entry in the waiting queue
    digests: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as needed
    group: ForkGroup | None = None
    started: bool = False
    num_targets: int = -1  # prompt log-probabilities asked of the device so far (-1: it wants none)
    after: int = -1  # one more target: a token after the prompt (-1: there is none)
    entropy: bool = False  # with the targets, entropies are wanted
    pooling: str = ""  # the targets are hidden states: of the last token, of all (mean), of the first (cls)
    num_pooled: int = 0  # of those that came
    pooled_from: int = 0  # hidden states of earlier epochs do not count: they are of other weights
    num_cached: int = 0  # prefix hit of the first admission, in tokens
    saved: Saved | None = None  # its KV, if it is kept while the request waits
    # adapter and salt: what the root is made of, beside weights
    origin: tuple[int | None, str | None] = (None, None)
    adapter: int = 0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def all_targets(self) -> int:
        """Prompt log-probabilities that it wants, if it wants any; or the end of the tokens to pool."""
        if self.pooling:
            return 1 if self.pooling == "cls" else len(self.prompt)
        return len(self.prompt) - (self.after < 0)

    @property
    def first_target(self) -> int:
        return len(self.prompt) - 1 if self.pooling == "last" else 0


@dataclass(slots=True, eq=False)
class ForkGroup:
    """The choices of one request. The leader prefills the prompt, the others fork from its blocks."""

    leader: Request
    held: list[Request]
    ready_epoch: int = -1  # the leader's epoch in which its whole prompt was scheduled
    prompt_counted: bool = False
