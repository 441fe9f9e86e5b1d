"""What a front end (HTTP server, batch runner) knows of an engine. Standard library only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lmjax.types import LoraInfo, PoolingParams, RequestMetrics, RequestUpdate, SamplingParams


@dataclass(slots=True, frozen=True)
class PoolingInfo:
    """What a model makes of a text besides answers.

    ``task``: embed, or score (a cross-encoder: a number for two texts read together). ``kind``: last, mean or cls.
    ``normalize``: embeddings have length 1, or scores go through a sigmoid, unless asked otherwise. ``width``: numbers
    of an embedding. ``dimensions``: shorter ones that may be asked for; empty: any; None: none.
    """

    task: str
    kind: str
    normalize: bool
    width: int
    dimensions: tuple[int, ...] | None = None
    lower: bool = False  # texts are made lower case


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """Fixed facts of a ready engine."""

    model: str  # path or name as given
    model_type: str
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    block_size: int
    num_kv_blocks: int  # usable blocks of the smallest group
    max_num_seqs: int
    dtype: str
    platform: str  # "cpu", "gpu"
    device_count: int
    eos_token_ids: tuple[int, ...] = ()
    # the model's own sampling defaults (generation_config.json), names as in SamplingParams
    default_sampling: dict[str, Any] = field(default_factory=dict)
    logprobs_mode: str = "raw_logprobs"  # or processed_logprobs
    generates: bool = True  # False: --runner pooling
    pooling: PoolingInfo | None = None  # None: this engine cannot pool
    max_loras: int = 0  # adapters on the device at once; 0: --enable-lora was not given


@dataclass(slots=True)
class EngineStats:
    """A snapshot; counters are totals since the start of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # 0-1, blocks in use (cached free ones are free)
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    host_usage: float = 0.0  # 0-1, of the host tier's blocks
    host_queries: int = 0  # tokens of ``prefix_queries`` that were not on the device, if there is a host tier
    host_hits: int = 0  # those of them, and of ``prefix_hits``, that were in it
    swaps_out: int = 0  # preempted requests of which something went to the host
    swaps_in: int = 0  # and came back from there
    swapped_out_blocks: int = 0  # evicted prefixes included
    swapped_in_blocks: int = 0
    swapped_bytes: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    scheduled_tokens: int = 0
    padded_tokens: int = 0
    compiles: int = 0  # after ready
    pipeline_ticks: int = 0
    pipeline_idle_ticks: int = 0  # in which no step entered, though others were under way
    step_host_seconds: float = 0.0
    step_device_seconds: float = 0.0
    running_loras: list[str] = field(default_factory=list)  # adapters of requests that have begun, each once
    waiting_loras: list[str] = field(default_factory=list)  # of those that have not
    iteration_tokens: list[int] = field(default_factory=list)  # scheduled tokens of each step since the last snapshot


class EngineReport(NamedTuple):
    """One of the engines behind a client. ``alive``: it is ready; else it is being started anew."""

    info: EngineInfo
    stats: EngineStats
    alive: bool


class Pooled(NamedTuple):
    """``values``: float32 bytes of an embedding, or of one score."""

    values: bytes
    num_prompt_tokens: int
    num_cached_tokens: int
    metrics: RequestMetrics
    engine: int = 0


class EngineClient(Protocol):
    """Implemented by ``lmjax.engine.async_engine.AsyncEngine`` and by tests' fakes."""

    info: EngineInfo
    tokenizer: Any  # lmjax.text.tokenizer.Tokenizer

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """The prompt (truncated if asked) and the parameters with ``max_tokens`` and bad words resolved.

        Raises ``ParameterError`` naming the field: ids outside the vocabulary, empty prompt, prompt + max_tokens
        over the context, logprobs over ``max_logprobs``, ...
        """
        ...

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> AsyncIterator[RequestUpdate]:
        """Validates at the call, then yields updates; closing the iterator aborts the request.

        ``lora``: the adapter to answer with, one of ``loras``. Updates that the reader has not taken are merged into
        one. Raises ``AdapterError`` for an adapter that is not there, at the call or, where it went meanwhile, from
        the iterator, as ``QueueFullError`` and ``EngineDeadError``.
        """
        ...

    def pooling_prompt(
        self,
        text: str | list[int],
        params: PoolingParams,
        second: str | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], int]:
        """The token ids of a text, or of a pair for a cross-encoder, truncated if asked, and the ``split`` of ``pool``.

        Raises ``ParameterError`` for what ``pool`` would not take.
        """
        ...

    async def pool(
        self,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        split: int = 0,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> Pooled:
        """The embedding of a text, or with a cross-encoder the score of a pair, whose second text begins at ``split``.

        Cancelling it aborts the request. Raises ``ParameterError``, ``AdapterError``, ``QueueFullError`` and
        ``EngineDeadError``.
        """
        ...

    def reports(self) -> dict[int, EngineReport]:
        """Of each engine by its number; one that is started anew goes on counting.

        ``iteration_tokens`` are those since the last call.
        """
        ...

    @property
    def weight_version(self) -> int | str:
        """Of the weights that requests are answered with; 0 are those of the start."""
        ...

    @property
    def sleep_level(self) -> int:
        """0: awake; 1: the KV pool is freed; 2: the weights, too. Requests wait until ``wake_up``."""
        ...

    async def load_weights(self, path: str, version: int | str | None = None, kv_cache: str = "keep") -> None:
        """Other weights of the same model, from a directory or a .gguf file, while requests go on. ``kv_cache``:
        "keep" what running requests have computed with the old ones, or "recompute" it. Raises ``OrderError``."""
        ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self) -> None:
        """After level 2 the weights are read again from where they came from. Raises ``OrderError``."""
        ...

    @property
    def loras(self) -> Mapping[str, LoraInfo]:
        """The adapters that requests may name. ``on_device`` is of when one was loaded."""
        ...

    async def load_lora(self, name: str, path: str) -> None:
        """An adapter from a PEFT directory, while requests go on. Raises ``AdapterError``; then nothing has changed."""
        ...

    async def unload_lora(self, name: str) -> None:
        """New requests cannot name it from the call on; those that are there are answered with it. Raises
        ``AdapterError`` if there is no such adapter."""
        ...

    @property
    def ready(self) -> bool: ...

    @property
    def dead(self) -> str | None:
        """Why the engine is dead, or None."""
        ...

    async def close(self) -> None: ...
