"""The executor of an encoder: one program a step, from a closed set of token buckets; no state on the device."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.config import ConfigError, EngineConfig, flag
from lmjax.core.plan import ExecutorInfo, WholePlan
from lmjax.models.encoder import EncoderBatch, abstract_params, forward
from lmjax.models.encoder_spec import EncoderSpec, encoder_from_hf
from lmjax.runtime.compiler import CompileMonitor, Program, compile_all
from lmjax.runtime.inputs import MAX_IN_FLIGHT, Ring, aligned_zeros
from lmjax.runtime.jax_executor import ModelInfo
from lmjax.runtime.live import Loaded, Loading, check_layout, file_digest, layout_of
from lmjax.runtime.platform import own_context, writing_to_own_cache
from lmjax.runtime.resolve import resolve_dtype
from lmjax.runtime.runner import with_max_length
from lmjax.types import ParameterError
from lmjax.weights.encoder import load_encoder
from lmjax.weights.errors import WeightError
from lmjax.weights.pooling import read_pooling
from lmjax.weights.source import ModelSource, resolve_model

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_PARTS = ("token_ids", "positions", "types", "rows", "marks")
# settings that mean nothing to an encoder, and so must be as they are by default
_OF_DECODERS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "nnodes", "deterministic", "bundle"),
    *("kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "swap_space", "attention_backend"),
    *("quantization", "quantized_weights"),
)


class EncoderKey(NamedTuple):
    num_tokens: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"encoder[{self.num_tokens},{self.num_rows}]"


@dataclass(slots=True)
class _InFlight:
    plan: WholePlan
    sums: jax.Array  # float32 [S, width]
    submitted: float


def build_encoder(
    config: EngineConfig, source: ModelSource, platform: str, device_count: int, tell: Callable[[str], None]
) -> EncoderExecutor:
    """Loads the model and compiles everything. Raises ``ConfigError`` and ``WeightError``."""
    spec, config = encoder_spec(config, source)
    dtype = resolve_dtype(config, source, platform)
    tell("loading weights")
    params = load_encoder(source, spec, dtype, config.load_format, config.seed)
    num_seqs = config.max_num_seqs or (256 if platform == "gpu" else 64)
    budget = max(config.max_num_batched_tokens or (2048 if platform == "gpu" else 512), spec.max_len)
    keys = [EncoderKey(t, min(t, num_seqs)) for t in sorted({*(t for t in TOKENS if t < budget), budget})]
    programs: dict[Hashable, Program] = {key: _program(spec, key, dtype) for key in reversed(keys)}
    tell(f"compiling {len(programs)} programs, the largest first")
    with writing_to_own_cache():
        compiled = compile_all(programs, tell)
    return EncoderExecutor(
        info=ExecutorInfo(
            kv_specs=(),
            num_blocks=(),
            block_size=config.block_size,
            max_num_seqs=num_seqs,
            max_model_len=spec.max_len,
            vocab_size=spec.vocab,
            max_logprobs=config.max_logprobs,
            token_buckets=tuple(key.num_tokens for key in keys),
            generates=False,
            pooled_width=1 if spec.scores else spec.hidden,
            scores=spec.scores,
            sigmoid=config.pooler_config.get("use_activation", spec.sigmoid),
        ),
        model_info=ModelInfo(
            str(source.path), spec.model_type, dtype, platform, device_count, source.config, source.generation_config
        ),
        params=params,
        programs=compiled,
        monitor=CompileMonitor(config.require_warm),
        load=partial(_load, config, source, spec, dtype),
    )


def encoder_spec(config: EngineConfig, source: ModelSource) -> tuple[EncoderSpec, EngineConfig]:
    """With the settings that the model's files decide. Raises ``ConfigError``."""
    defaults = {f.name: f.default for f in fields(EngineConfig)}
    for name in _OF_DECODERS:
        value = getattr(config, name)
        if value != defaults[name]:
            raise ConfigError(f"{flag(name)}: got {value!r}, must be left out: the model is an encoder")
    if source.kind != "hf":
        raise ConfigError("--model: an encoder's weights come from a directory of .safetensors files")
    try:
        longest = encoder_from_hf(source.config, None).max_len
        config = with_max_length(config, read_pooling(source, config), longest)
        return encoder_from_hf(source.config, config.max_model_len), config
    except ValueError as error:
        if isinstance(error, ConfigError | WeightError):
            raise
        name, _, rest = str(error).partition(":")
        where = "--max-model-len" if name == "max_model_len" else f"--model: {source.path}: {name}"
        raise ConfigError(f"{where}:{rest}") from error


def _load(config: EngineConfig, source: ModelSource, spec: EncoderSpec, dtype: str, path: str | None) -> Loaded:
    """Weights of the same model, from ``path`` or from where it was started."""
    load_format = config.load_format
    if path is not None:
        source = resolve_model(path, hf_overrides=config.hf_overrides or None)
        try:
            other = encoder_from_hf(source.config, config.max_model_len)
        except ValueError as error:
            raise WeightError(path, f"is no encoder of this kind: {error}") from error
        if other != spec:
            raise WeightError(path, f"is another model: {other}, served is {spec}")
        load_format = "auto"
    return Loaded(load_encoder(source, spec, dtype, load_format, config.seed), file_digest(source))


def _program(spec: EncoderSpec, key: EncoderKey, dtype: str) -> Program:
    def encode(params: Any, packed: jax.Array) -> jax.Array:
        return forward(params, spec, EncoderBatch(*packed), key.num_rows)

    packed = jax.ShapeDtypeStruct((len(_PARTS), key.num_tokens), jnp.int32)
    return Program(key.name, encode, (abstract_params(spec, dtype), packed))


class EncoderExecutor:
    """Implements ``core.plan.Executor`` for plans of whole sequences. One thread at a time."""

    def __init__(
        self,
        *,
        info: ExecutorInfo,
        model_info: ModelInfo,
        params: Any,
        programs: dict[Hashable, Any],
        monitor: CompileMonitor,
        load: Callable[[str | None], Loaded],
    ):
        self.info, self.model_info, self.params = info, model_info, params
        self.functional = None
        self._layout, self._load = layout_of(params), load
        self._programs, self._monitor = programs, monitor
        self._keys: list[Any] = sorted(programs)  # type: ignore[type-var]
        self._rings = {key: Ring(partial(_buffer, key)) for key in self._keys}
        self._num_in_flight = self._padded_tokens = 0
        self._device_seconds = self._last_done = 0.0

    def submit(self, plan: WholePlan) -> _InFlight:
        if self._num_in_flight == MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight already: collect one first")
        begin, total = time.monotonic(), len(plan.token_ids)
        key = self._keys[bisect_left(self._keys, total, key=lambda key: key.num_tokens)]
        packed = self._rings[key].take()
        pack(plan, packed, key.num_rows)
        with self._monitor.watch():
            sums = self._programs[key](self.params, packed)
            sums.copy_to_host_async()
        self._num_in_flight += 1
        self._padded_tokens += key.num_tokens - total
        return _InFlight(plan, sums, begin)

    def collect(self, in_flight: _InFlight) -> np.ndarray:
        """float32 [rows, width]"""
        with self._monitor.watch():
            sums = np.asarray(in_flight.sums)[: in_flight.plan.num_rows]
        self._num_in_flight -= 1
        now = time.monotonic()
        self._device_seconds += now - max(in_flight.submitted, self._last_done)
        self._last_done = now
        return sums

    def context(self) -> AbstractContextManager[None]:
        """In which a caller's own thread makes steps."""
        return own_context()

    @property
    def has_params(self) -> bool:
        return self.params is not None

    def has_lost_params(self) -> bool:
        """Whether whoever shares the arrays has deleted or donated them."""
        return self.params is not None and self.params.embed.is_deleted()

    def check_params(self, tree: Any) -> None:
        check_layout(tree, self._layout)

    def adapt(self, tree: Any, names: Any = None) -> Any:
        raise ParameterError("params", "an encoder takes weights from files only")

    def set_params(self, params: Any) -> None:
        if isinstance(params, Loading):
            self.params = params.take()
        else:
            self.check_params(params)
            self.params = params

    def start_loading(self, path: str | None) -> Loading:
        return Loading(path, self._load)

    def sleep(self, level: int) -> None:
        """Level 1: there is no KV pool to free."""
        if level == 2:
            self.params = None

    def wake(self) -> None:
        assert self.params is not None, "there are no weights"

    def stats(self) -> dict[str, float]:
        return {
            "compiles_total": self._monitor.count,
            "padded_tokens_total": self._padded_tokens,
            "device_seconds": self._device_seconds,
        }

    def close(self) -> None:
        self.params, self._programs = None, {}


def _buffer(key: EncoderKey) -> np.ndarray:
    return aligned_zeros(len(_PARTS) * key.num_tokens).reshape(len(_PARTS), key.num_tokens)


def pack(plan: WholePlan, out: np.ndarray, num_rows: int) -> None:
    """Writes the plan into a program's buffer, int32 [5, T]: see ``EncoderBatch``."""
    total, lengths = len(plan.token_ids), plan.lengths
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    token_ids, positions, types, rows, marks = out
    out[:, total:] = 0
    rows[total:] = num_rows
    token_ids[:total] = plan.token_ids
    np.subtract(np.arange(total, dtype=np.int32), starts.repeat(lengths), out=positions[:total])
    splits = np.where(plan.splits > 0, plan.splits, lengths).repeat(lengths)
    types[:total] = positions[:total] >= splits
    rows[:total] = np.arange(plan.num_rows, dtype=np.int32).repeat(lengths)
    marks[:total] = 0
    for start, length, pooling in zip(starts.tolist(), lengths.tolist(), plan.poolings, strict=True):
        first = start + length - 1 if pooling == "last" else start
        marks[first : start + length if pooling == "mean" else first + 1] = 1
