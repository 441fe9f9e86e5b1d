"""Settings and a model's config.json resolved into what programs are made of. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from lmjax.config import ConfigError, EngineConfig
from lmjax.models import decoder
from lmjax.models.registry import dtype_from_hf, spec_from_hf
from lmjax.models.spec import DecoderSpec
from lmjax.runtime.buckets import Buckets
from lmjax.runtime.programs import Shapes, forward_program
from lmjax.types import KVSpec
from lmjax.weights.source import ModelSource


@dataclass(frozen=True)
class Resolved:
    """A model with every default of its settings filled in, but for the size of the KV pool.

    ``spec``: for the context length that was asked for. ``num_batched``: the token budget of a step.
    """

    config: EngineConfig
    source: ModelSource
    platform: str
    spec: DecoderSpec
    dtype: str
    kv_specs: tuple[KVSpec, ...]
    num_seqs: int
    num_batched: int

    def shapes(self, num_blocks: tuple[int, ...], max_model_len: int) -> Shapes:
        """For a pool of ``num_blocks`` and the context length that it was sized for."""
        return Shapes(
            # some rotary embeddings depend on the served length
            spec=self.spec if max_model_len == self.spec.max_len else make_spec(self.source, max_model_len),
            dtype=self.dtype,
            kv_specs=self.kv_specs,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.num_seqs,
            max_model_len=max_model_len,
            max_logprobs=self.config.max_logprobs,
        )

    def buckets(self, max_model_len: int) -> Buckets:
        return Buckets(self.num_seqs, min(self.num_batched, self.num_seqs * max_model_len))


def resolve(config: EngineConfig, source: ModelSource, platform: str) -> Resolved:
    """platform: "cpu" or "gpu". Raises ``ConfigError`` for settings that don't fit the model."""
    spec = make_spec(source, config.max_model_len)
    dtype = _dtype(config, source, platform)
    return Resolved(
        config=config,
        source=source,
        platform=platform,
        spec=spec,
        dtype=dtype,
        kv_specs=decoder.kv_specs(spec, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype),
        num_seqs=config.max_num_seqs or (256 if platform == "gpu" else 64),
        num_batched=_token_budget(config, spec, platform),
    )


def make_spec(source: ModelSource, max_model_len: int | None) -> DecoderSpec:
    try:
        return spec_from_hf(source.config, max_model_len)
    except ValueError as error:
        raise ConfigError(f"--model: {source.path}: {error}") from error


def _dtype(config: EngineConfig, source: ModelSource, platform: str) -> str:
    if config.dtype != "auto":
        return config.dtype
    if platform == "cpu":
        return "float32"  # a CPU converts narrower weights again on every call
    return dtype_from_hf(source.config) or "bfloat16"


def _token_budget(config: EngineConfig, spec: DecoderSpec, platform: str) -> int:
    if config.enable_chunked_prefill:
        return config.max_num_batched_tokens or (2048 if platform == "gpu" else 512)
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < spec.max_len:
        raise ConfigError(
            f"--max-num-batched-tokens: got {config.max_num_batched_tokens}, must be at least the context length "
            f"({spec.max_len}) where chunked prefill is switched off"
        )
    return config.max_num_batched_tokens or spec.max_len


def num_bytes(tree: Any) -> int:
    """Of all arrays of a tree, real or abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def program_bytes(resolved: Resolved) -> int:
    """Temporaries and outputs of the largest program, as XLA plans them. They do not grow with the pool."""
    shapes = resolved.shapes(tuple(2 for _ in resolved.kv_specs), resolved.spec.max_len)
    key = resolved.buckets(resolved.spec.max_len).prompt_logprobs
    memory = forward_program(shapes, key).compile().memory_analysis()
    own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return 2 * own + num_bytes(shapes.state())  # two steps are in flight; their outputs live side by side
