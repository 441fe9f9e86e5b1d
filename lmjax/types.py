"""What crosses every layer: sampling parameters, outputs, KV group specs. Standard library only.

Shape letters used in the whole repository: ``T`` tokens, ``S`` sequences (rows), ``P`` blocks per sequence,
``B`` block size, ``N`` query heads, ``K`` KV heads, ``H`` head dim, ``D`` model, ``F`` ffn, ``V`` vocabulary,
``E`` experts, ``L`` layers, ``G`` KV groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]

# Limits of the request fields whose state has a fixed shape on the device (see lmjax/sampling/).
MAX_N = 128
LARGEST = 2**63 - 1  # what goes to the engine has 64 bits
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16
SEED_RANGE = (-(2**63), 2**64 - 1)


class ParameterError(ValueError):
    """A request parameter is out of range. ``field`` names it; the message has the value and what is allowed."""

    def __init__(self, field_name: str, message: str):
        super().__init__(f"{field_name}: {message}")
        self.field = field_name


class QueueFullError(RuntimeError):
    """The waiting queue is at its cap (HTTP 429). ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class ModelError(ValueError):
    """A model's files are missing, damaged or of a kind that is not supported: one line that names the file and the
    cause. The settings are not at fault."""


class OrderError(ValueError):
    """An engine did not do what its operator asked (weights, sleep); nothing has changed. ``internal``: the engine is
    at fault, not what was asked."""

    def __init__(self, message: str, internal: bool = False):
        super().__init__(message)
        self.internal = internal


class AdapterError(ValueError):
    """A LoRA adapter cannot be loaded, or there is none of that name; nothing has changed. The message names the file,
    the module or the field at fault, what it is and what is allowed. ``unknown``: there is no such adapter. ``field``:
    whether its files ("path") or its name are at fault."""

    def __init__(self, message: str, unknown: bool = False, field: Literal["path", "name"] = "path"):
        super().__init__(message)
        self.unknown, self.field = unknown, field


class EngineDeadError(RuntimeError):
    """The engine (process) has died or is shutting down: no request of it can go on.

    ``retry_after`` (seconds): there is another engine, or soon will be. None: not here.
    """

    def __init__(self, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.retry_after = retry_after


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples. Every field is applied; a wrong value raises ``ParameterError`` at construction.

    Log-probabilities are raw (of the model's own distribution, before temperature, bias, penalties and filters), or
    with ``--logprobs-mode processed_logprobs`` of the distribution that is drawn from.
    ``logprobs=k`` asks for the chosen token and the ``k`` most likely ones; ``None`` for none.
    ``seed=None``: one is drawn when the request is admitted and kept, so preemption never changes the answer.
    ``bad_words``: strings; tokenized by the engine's front (``bad_words_ids`` carries the result to the engine).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep the last k prompt tokens; -1: as many as fit

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        elif self.stop is None:
            object.__setattr__(self, "stop", [])
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", [])
        if not self._plain_numbers():
            self._check_numbers()
        if not self._plain_lists():
            self._check_lists()

    def _plain_numbers(self) -> bool:
        """Whether all numbers are plainly fine. A short cut: the engine builds this anew for each request it reads."""
        most, seed, asked, prompt_asked = self.max_tokens, self.seed, self.logprobs, self.prompt_logprobs
        return (
            type(self.n) is type(self.top_k) is type(self.min_tokens) is int
            and 1 <= self.n <= MAX_N
            and -1 <= self.top_k <= LARGEST
            and 0 <= self.min_tokens <= LARGEST
            and type(self.temperature) is type(self.top_p) is type(self.min_p) is type(self.repetition_penalty) is float
            and type(self.presence_penalty) is type(self.frequency_penalty) is float
            and 0.0 <= self.temperature <= 1e6
            and 0.0 < self.top_p <= 1.0
            and 0.0 <= self.min_p <= 1.0
            and 0.0 < self.repetition_penalty <= 1e6
            and -2.0 <= self.presence_penalty <= 2.0
            and -2.0 <= self.frequency_penalty <= 2.0
            and (most is None or (type(most) is int and max(1, self.min_tokens) <= most <= LARGEST))
            and (seed is None or (type(seed) is int and SEED_RANGE[0] <= seed <= SEED_RANGE[1]))
            and (asked is None or (type(asked) is int and asked >= 0))
            and (prompt_asked is None or (type(prompt_asked) is int and prompt_asked >= 0))
            and self.truncate_prompt_tokens is None
            and type(self.include_stop_str_in_output) is type(self.ignore_eos) is bool
            and type(self.skip_special_tokens) is type(self.spaces_between_special_tokens) is bool
        )

    def _plain_lists(self) -> bool:
        """Whether there are no lists but of stop strings, and those are fine."""
        if not (self.allowed_token_ids is self.logit_bias is self.bad_words is None):
            return False
        if type(self.stop_token_ids) is not list or self.stop_token_ids:
            return False
        if type(self.stop) is not list or len(self.stop) > MAX_STOP_STRINGS:
            return False
        return all(type(text) is str and 0 < len(text) <= MAX_STOP_CHARS for text in self.stop)

    def _check_numbers(self) -> None:
        def integer(name: str, low: int, high: int = LARGEST, none: bool = False) -> None:
            value = getattr(self, name)
            if none and value is None:
                return
            if not _is_int(value) or not low <= value <= high:
                bounded = high != LARGEST or (_is_int(value) and value > high)
                top = f" and at most {high}" if bounded else ""
                raise ParameterError(name, f"got {value!r}, must be an integer of at least {low}{top}")

        def number(name: str, low: float, high: float, open_low: bool = False) -> None:
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high or (open_low and value == low):
                bracket = "(" if open_low else "["
                raise ParameterError(name, f"got {value!r}, must be a number in {bracket}{low}, {high}]")

        integer("n", 1, MAX_N)
        number("temperature", 0.0, 1e6)
        number("top_p", 0.0, 1.0, open_low=True)
        integer("top_k", -1)
        number("min_p", 0.0, 1.0)
        integer("seed", *SEED_RANGE, none=True)
        number("presence_penalty", -2.0, 2.0)
        number("frequency_penalty", -2.0, 2.0)
        number("repetition_penalty", 0.0, 1e6, open_low=True)
        integer("max_tokens", 1, none=True)
        integer("min_tokens", 0)
        integer("logprobs", 0, none=True)
        integer("prompt_logprobs", 0, none=True)
        integer("truncate_prompt_tokens", -1, none=True)
        if self.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens", "got 0, must be -1 or at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"got {self.min_tokens}, must be at most max_tokens ({self.max_tokens})")
        flags = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"got {getattr(self, name)!r}, must be true or false")

    def _check_lists(self) -> None:
        def ids(name: str, values: Any) -> None:
            if not isinstance(values, list) or not all(_is_int(v) and v >= 0 for v in values):
                raise ParameterError(name, "must be a list of non-negative token ids")

        ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", "got [], must hold at least one token id")
        self._check_strings("stop", self.stop, MAX_STOP_STRINGS)
        self._check_strings("bad_words", self.bad_words or [], MAX_BAD_WORDS)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ParameterError("logit_bias", "must be a map from token id to a number in [-100, 100]")
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise ParameterError(
                    "logit_bias", f"got {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed"
                )
            for key, value in self.logit_bias.items():
                if not _is_int(key) or key < 0 or not _is_number(value) or not -100 <= value <= 100:
                    raise ParameterError(
                        "logit_bias", f"got {key!r}: {value!r}, must map token ids to numbers in [-100, 100]"
                    )

    @staticmethod
    def _check_strings(name: str, values: Any, most: int) -> None:
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise ParameterError(name, "must be a list of non-empty strings")
        if len(values) > most:
            raise ParameterError(name, f"got {len(values)} strings, at most {most} are allowed")
        longest = max((len(v) for v in values), default=0)
        if longest > MAX_STOP_CHARS:
            raise ParameterError(name, f"got a string of {longest} characters, at most {MAX_STOP_CHARS} are allowed")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(slots=True, frozen=True)
class KVSpec:
    """One KV group: layers that share a block table. Sizes in elements; ``window`` in tokens for kind ``window``.

    A token at position p of a window group sees positions p - window + 1 .. p. A ``latent`` group has one vector of
    ``k_dim`` a token and layer, keys and values in one: ``v_dim`` is 0, and ``kv_heads`` how many devices hold it.
    """

    kind: Literal["full", "window", "latent"]
    layers: tuple[int, ...]
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str = "float32"
    window: int | None = None

    @property
    def item_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}[self.dtype]

    @property
    def sides(self) -> int:
        """Vectors that are stored a token and head: key and value, or both in one."""
        return 2 if self.v_dim else 1

    @property
    def scaled(self) -> bool:
        """Elements of 1 byte: a float32 scale a token, head and side beside them."""
        return self.item_bytes == 1

    def bytes_per_token(self, scales: bool = True) -> int:
        """scales: with those of 1-byte elements."""
        of_scales = self.sides * 4 if scales and self.scaled else 0
        return len(self.layers) * self.kv_heads * ((self.k_dim + self.v_dim) * self.item_bytes + of_scales)


@dataclass(slots=True, frozen=True)
class LoraInfo:
    """A LoRA adapter that requests may name. ``path``: of its directory, as given. ``on_device``: it has a slot now."""

    name: str
    path: str
    rank: int
    on_device: bool = False


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Log-probabilities of one position: the token itself (rank from 1) and the most likely ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolingParams:
    """How one text is embedded or a pair is scored. A wrong value raises ``ParameterError`` at construction.

    ``dimensions``: the first so many numbers of the embedding, for models that were trained for it (Matryoshka).
    ``use_activation``: embeddings get length 1, scores of a cross-encoder go through its sigmoid; None: as the model's
    files or ``--pooler-config`` say. ``truncate_prompt_tokens``: keep the first so many tokens of a text, special ones
    included; -1: as many as fit; None: a longer text is refused.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and not (_is_int(self.dimensions) and self.dimensions >= 1):
            raise ParameterError("dimensions", f"got {self.dimensions!r}, must be an integer of at least 1")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise ParameterError("use_activation", f"got {self.use_activation!r}, must be true or false")
        keep = self.truncate_prompt_tokens
        if keep is not None and not (_is_int(keep) and (keep == -1 or keep >= 1)):
            raise ParameterError("truncate_prompt_tokens", f"got {keep!r}, must be -1 or an integer of at least 1")


@dataclass(slots=True)
class Delta:
    """What is new for one choice of a request since the last update. ``text`` may lag behind ``token_ids``
    (incomplete UTF-8, a possible stop string) and catches up at the latest with ``finish_reason``."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: list[int | str] = field(default_factory=list)  # one a token: of the weights that drew it

    def merge(self, other: Delta) -> None:
        """Append a later delta of the same choice (a slow reader gets one merged delta)."""
        self.text += other.text
        self.token_ids.extend(other.token_ids)
        self.weight_versions.extend(other.weight_versions)
        if other.logprobs is not None:
            self.logprobs = (self.logprobs or []) + other.logprobs
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason


@dataclass(slots=True)
class RequestUpdate:
    """One item of the stream that ``generate`` yields. ``finished`` is true once, in the last item.

    ``prompt_logprobs``: entry 0 is ``None``, then one entry a prompt token; given once, when complete.
    ``error``: a message; the request ended without an answer (then ``finished`` is true).
    ``engine``: the number of the engine that works on it.
    """

    request_id: str
    deltas: list[Delta]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False
    error: str | None = None
    metrics: RequestMetrics | None = None
    engine: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of time.monotonic(); zero = has not happened."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, frozen=True)
class Logprob:
    """As in vLLM: an entry of the ``{token id: Logprob}`` maps of ``RequestOutput``."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    weight_versions: list[int | str] = field(default_factory=list)  # one a token: of the weights that drew it


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: Any  # float32 [D], numpy

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """As in vLLM: ``output.outputs.embedding``."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """As in vLLM: ``output.outputs.score``."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # of a pair, or of both texts one after the other where each is embedded by itself
    num_cached_tokens: int = 0
