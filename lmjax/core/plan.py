"""The data records between scheduler and executor. The scheduler emits them; nothing else decides.

All row arrays are numpy, valid until the step was collected. Rows ``[:num_decode]`` have one token each whose value
is on the device in ``tokens[slot, start]``; the other rows are prefill: their token ids are in ``token_ids``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from lmjax.types import KVSpec, SamplingParams


@dataclass(slots=True)
class SlotLoad:
    """A request takes a slot: executors set the slot's sampling state from it before the step's forward.

    ``history``: int32 [n], every token id known so far (prompt, and outputs after preemption), for the device's
    token table; penalties and bad words read it. ``num_prompt_tokens`` of them are prompt.
    ``sample_index``: which of the ``n`` choices this is. ``seed`` is always resolved here.
    ``stop_ids``: eos (unless ignored) and stop_token_ids: masked until ``min_tokens`` tokens were generated.
    """

    slot: int
    params: SamplingParams
    seed: int
    sample_index: int
    history: np.ndarray
    num_prompt_tokens: int
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: list[list[int]] | None = None


POOLED = -2  # in target_ids
_EPOCH_BITS = 20


def row_key(handle: int, epoch: int) -> int:
    """``epoch``: how often the request was preempted. Handles are below 2**43."""
    return (handle << _EPOCH_BITS) | (epoch & ((1 << _EPOCH_BITS) - 1))


@dataclass(slots=True)
class StepPlan:
    step_id: int
    num_decode: int
    slots: np.ndarray  # intp [R]
    handles: np.ndarray  # int64 [R]  the request's handle, unique for the life of the engine
    keys: np.ndarray  # int64 [R]  handle and epoch in one (row_key): results are matched by it, never by slot
    starts: np.ndarray  # int32 [R]  position of the first token = tokens whose KV is in the pool
    lengths: np.ndarray  # int32 [R]  tokens of the row in this step
    samples: np.ndarray  # bool [R]  the row's last token draws the next one (position start + length)
    token_ids: np.ndarray  # int32 [sum(lengths[num_decode:])]  ids of the prefill rows, concatenated
    # int32, as long as token_ids: the id that follows each prefill token in the prompt, -1 if the row wants no
    # prompt log-probability there, POOLED if its hidden state goes into the row's sum. None: no row wants anything.
    target_ids: np.ndarray | None
    patches: np.ndarray  # int32 [M, 4]  (group, slot, column, block id), to apply before the forward; no place twice
    entropy: bool = False  # some of those rows want entropies, too
    adapters: np.ndarray | None = None  # int32 [R]  the slot of the row's adapter, -1 for none. None: no row has one
    adapter_loads: list[tuple[int, int]] = field(default_factory=list)  # (adapter, its slot), before the forward
    slot_loads: list[SlotLoad] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (group, source, target block)
    # Blocks that move between the tiers, carried out in this order: all of swaps_out, all of swaps_in, copies, forward.
    # So a device block named in swaps_out may be written again by the same plan, and a host block may be in both.
    swaps_out: list[tuple[int, int, int]] = field(default_factory=list)  # (group, device block, host block)
    swaps_in: list[tuple[int, int, int]] = field(default_factory=list)  # (group, host block, device block)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + len(self.token_ids)


@dataclass(slots=True)
class WholePlan:
    """A step of an encoder: R whole sequences, one after the other. The result is float32 [R, width]."""

    step_id: int
    handles: np.ndarray  # int64 [R]
    lengths: np.ndarray  # int32 [R]
    splits: np.ndarray  # int32 [R]  where the second text begins; 0: there is none
    poolings: list[str]  # [R]  last, mean or cls
    token_ids: np.ndarray  # int32 [sum(lengths)]

    @property
    def num_rows(self) -> int:
        return len(self.handles)


def empty_plan() -> StepPlan:
    """What a pipeline is given while it has work and no request can have a token: the others move on."""
    ids, handles, tokens = np.zeros(0, np.intp), np.zeros(0, np.int64), np.zeros(0, np.int32)
    patches = np.zeros((0, 4), np.int32)
    return StepPlan(-1, 0, ids, handles, handles, tokens, tokens, np.zeros(0, bool), tokens, None, patches)


class TokenColumns(NamedTuple):
    """Token rows taken apart (views)."""

    token_ids: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int32 [n], from 1
    top_ids: np.ndarray  # int32 [n, k], best first
    top_logprobs: np.ndarray  # float32 [n, k]


def row_width(k: int | None) -> int:
    """int32 columns of a token row with the ``k`` most likely tokens; None: without log-probabilities.

    A token row is: token id, bits of its log-probability, its rank, then ``k`` pairs (token id, bits of its
    log-probability), best first. So a prefix of a row is a row with fewer pairs, or with none of it but the token.
    """
    return 1 if k is None else 3 + 2 * k


def pack_rows(columns: TokenColumns) -> np.ndarray:
    """int32 [n, row_width(k)]."""
    n, k = columns.top_ids.shape
    rows = np.empty((n, row_width(k)), np.int32)
    floats = rows.view(np.float32)
    rows[:, 0], floats[:, 1], rows[:, 2], rows[:, 3::2], floats[:, 4::2] = columns
    return rows


def unpack_rows(rows: np.ndarray) -> TokenColumns:
    """rows: int32 [n, row_width(k)], C-contiguous."""
    floats = rows.view(np.float32)
    return TokenColumns(rows[:, 0], floats[:, 1], rows[:, 2], rows[:, 3::2], floats[:, 4::2])


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens at positions ``first`` .. ``first + n - 1`` of one request."""

    handle: int
    first: int
    rows: np.ndarray  # int32 [n, row_width(max_logprobs)]
    entropies: np.ndarray | None = (
        None  # float32 [n], in nats, of the distributions that they are of; 0 if no row of the step wants any
    )
    pooled: int = 0  # if not 0: rows are float32 [1, D], the sum of the hidden states of so many tokens from ``first``
    key: int = 0  # the row's, with ``pooled``


@dataclass(slots=True)
class StepResult:
    """What the device said, by plan row. Rows that do not sample hold anything.

    The rows have log-probabilities only if some sampling row asked for them; then all have.
    """

    rows: np.ndarray  # int32 [R, 1 or row_width(max_logprobs)], see ``row_width``
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    seconds: float = 0.0  # that the step took, as far as the executor can tell; 0: it cannot

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [R]"""
        return self.rows[:, 0]


@dataclass(slots=True, frozen=True)
class HostTierInfo:
    """The second pool, in host memory, and what moving its blocks costs to begin with (the scheduler measures on).

    ``num_blocks``: per group, with a null block 0 that nothing is kept in. ``batch``: blocks of each group that one
    transfer moves; a smaller one costs as much. Seconds: ``out_seconds`` and ``in_seconds`` of a transfer,
    ``step_seconds`` of a step beside its tokens, ``token_seconds`` of a prompt token, ``pair_seconds`` of each earlier
    token that it reads.
    """

    num_blocks: tuple[int, ...]
    batch: int
    out_seconds: float
    in_seconds: float
    step_seconds: float
    token_seconds: float
    pair_seconds: float


@dataclass(slots=True, frozen=True)
class ExecutorInfo:
    """What the scheduler has to know of the device side. Block id 0 of every group is the null block."""

    kv_specs: tuple[KVSpec, ...]
    num_blocks: tuple[int, ...]  # per group, the null block included
    block_size: int
    max_num_seqs: int  # slots 0 .. max_num_seqs - 1
    max_model_len: int
    vocab_size: int  # rows of the embedding; a prompt id must be below it
    max_logprobs: int
    token_buckets: tuple[int, ...]  # ascending; a step has at most token_buckets[-1] tokens
    stages: int = 1  # of a pipeline: so many steps are under way, and each is read so many submits later
    host: HostTierInfo | None = None  # None: there is no host tier
    logprobs_mode: str = "raw_logprobs"
    generates: bool = True  # False: it has no programs to sample; every request pools
    max_loras: int = 0  # slots for adapters; 0: there are none
    pooled_width: int = 0  # numbers that a pooled request gets; 0: none can be pooled
    scores: bool = False  # what it gives is the score of a pair, not an embedding
    sigmoid: bool = True  # and goes through one

    def __post_init__(self) -> None:
        assert len(self.kv_specs) == len(self.num_blocks)


class Executor(Protocol):
    """Runs plans in order. ``submit`` returns at dispatch, ``collect`` waits; at most ``info.stages`` + 1 steps are in
    flight. With several stages a step is only done, and may only be collected, when ``stages`` - 1 more (``empty_plan``
    if there is no other) were submitted."""

    info: ExecutorInfo

    def submit(self, plan: StepPlan) -> Any: ...

    def collect(self, in_flight: Any) -> StepResult: ...

    def stats(self) -> dict[str, float]:
        """Counters of the device side: ``compiles_total``, ``padded_tokens_total``, ``device_seconds``,
        ``submit_wait_seconds`` (of ``submit``, in which it waited for the device)."""
        ...

    def close(self) -> None: ...

    # adapters, if ``info.max_loras``; they have numbers, which are never used again

    def read_adapter(self, path: str) -> Any:
        """Reads and checks the files of one: in any thread, beside the steps. Has ``rank``. ``AdapterError``."""
        ...

    def add_adapter(self, adapter: int, found: Any) -> None:
        """Plans may load what ``read_adapter`` has found into a slot from now on."""
        ...

    def drop_adapter(self, adapter: int) -> None:
        """No plan will load it any more."""
        ...

    # weights and sleep, between two calls of submit with nothing in a pipeline's stages

    has_params: bool

    def has_lost_params(self) -> bool:
        """Whether whoever shares the arrays has deleted or donated them."""
        ...

    def context(self) -> AbstractContextManager[None]:
        """In which a caller's own thread makes steps."""
        ...

    def set_params(self, params: Any) -> None:
        """The steps submitted from now on run with these: a tree, or what ``start_loading`` gave, done."""
        ...

    def start_loading(self, path: str | None) -> Any:
        """Reads weights beside the steps; None: from where the present ones came. Has ``done()``, then ``error``."""
        ...

    def sleep(self, level: int) -> None:
        """Frees the pool, and with level 2 the weights and the host tier. Nothing is in flight."""
        ...

    def wake(self) -> None:
        """Makes the pool anew, empty."""
        ...
