"""From a configuration to a ready executor: resolve, load, size, compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lmjax.config import ConfigError, EngineConfig
from lmjax.core.plan import ExecutorInfo
from lmjax.models import decoder
from lmjax.models.registry import dtype_from_hf, spec_from_hf
from lmjax.models.spec import DecoderSpec
from lmjax.runtime.buckets import Buckets
from lmjax.runtime.compiler import CompileMonitor, compile_all
from lmjax.runtime.inputs import InputPacker
from lmjax.runtime.jax_executor import JaxExecutor, ModelInfo
from lmjax.runtime.memory import (
    KVPlan,
    available_memory,
    check_weights_fit,
    cpu_pool_budget,
    gib,
    gpu_pool_budget,
    plan_kv,
)
from lmjax.runtime.platform import configure_jax, describe_platform, use_compilation_cache
from lmjax.runtime.programs import Shapes, all_programs, forward_program
from lmjax.types import KVSpec
from lmjax.weights.loader import load_params
from lmjax.weights.source import ModelSource, resolve_model

log = logging.getLogger(__name__)

Progress = Callable[[str], None]


def build_executor(config: EngineConfig, progress: Progress | None = None) -> JaxExecutor:
    """Loads the model and compiles everything; when it returns, nothing is left to compile.

    progress: is told what is being done. Raises ``ConfigError`` for settings that don't fit the model or the machine
    and ``WeightError`` for a model that cannot be read.
    """
    tell = progress or (lambda message: None)
    config.validate()
    configure_jax(config)
    use_compilation_cache(config)
    source = resolve_model(config.model, config.revision, config.download_dir, config.hf_overrides or None)
    platform, device_count = describe_platform()
    spec = _spec(source, config.max_model_len)
    dtype = _dtype(config, source, platform)
    kv_specs = decoder.kv_specs(spec, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    check_weights_fit(_num_bytes(decoder.abstract_params(spec, dtype)), _free_memory(platform))
    tell("loading weights")
    params = load_params(source, spec, dtype, config.load_format, config.seed, _in_tenths(tell))

    num_seqs = config.max_num_seqs or (256 if platform == "gpu" else 64)
    budget = _token_budget(config, spec, platform)
    tell("sizing the KV pool")
    plan = _plan_memory(config, spec, dtype, kv_specs, platform, num_seqs, budget)
    spec = _spec(source, plan.max_model_len)  # some rotary embeddings depend on the served length
    shapes = Shapes(
        spec=spec,
        dtype=dtype,
        kv_specs=kv_specs,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=num_seqs,
        max_model_len=plan.max_model_len,
        max_logprobs=config.max_logprobs,
    )
    buckets = Buckets(num_seqs, min(budget, num_seqs * plan.max_model_len))
    wanted = all_programs(shapes, buckets)
    tell(f"compiling {len(wanted)} programs, the largest first")
    programs = compile_all(wanted, progress)
    tell("allocating the KV pool")
    return JaxExecutor(
        info=ExecutorInfo(
            kv_specs=kv_specs,
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            max_num_seqs=num_seqs,
            max_model_len=plan.max_model_len,
            vocab_size=spec.vocab,
            max_logprobs=config.max_logprobs,
            token_buckets=buckets.token_buckets,
        ),
        model_info=ModelInfo(
            path=str(source.path),
            model_type=spec.model_type,
            dtype=dtype,
            platform=platform,
            device_count=device_count,
            config=source.config,
            generation_config=source.generation_config,
        ),
        params=params,
        # the pools come last: what compiling took is free again, and they are never moved
        state=_zeros(shapes.state()),
        pools=_zeros(shapes.pools()),
        programs=programs,
        packer=InputPacker(
            buckets,
            max_num_seqs=num_seqs,
            block_size=config.block_size,
            num_groups=len(kv_specs),
        ),
        monitor=CompileMonitor(config.require_warm),
    )


def _spec(source: ModelSource, max_model_len: int | None) -> DecoderSpec:
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


def _plan_memory(
    config: EngineConfig,
    spec: DecoderSpec,
    dtype: str,
    kv_specs: tuple[KVSpec, ...],
    platform: str,
    num_seqs: int,
    num_batched: int,
) -> KVPlan:
    available = _free_memory(platform)
    if platform == "gpu":
        limit, used = _device_memory()
        pool_budget = gpu_pool_budget(limit, used, _program_bytes(config, spec, dtype, kv_specs, num_seqs, num_batched))
    else:
        pool_budget = cpu_pool_budget(available)
    plan = plan_kv(
        kv_specs,
        config,
        model_max_len=spec.max_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched,
        budget=pool_budget,
        available=available,
    )
    log.info(
        "KV pool: %d tokens in blocks of %d (%s); %.1f requests of the full %d tokens fit at once",
        plan.num_tokens,
        config.block_size,
        gib(plan.num_bytes),
        plan.num_tokens / plan.max_model_len,
        plan.max_model_len,
    )
    return plan


def _program_bytes(
    config: EngineConfig, spec: DecoderSpec, dtype: str, kv_specs: tuple[KVSpec, ...], num_seqs: int, num_batched: int
) -> int:
    """Temporaries and outputs of the largest program, as XLA plans them. They do not grow with the pool."""
    shapes = Shapes(
        spec=spec,
        dtype=dtype,
        kv_specs=kv_specs,
        num_blocks=tuple(2 for _ in kv_specs),
        block_size=config.block_size,
        max_num_seqs=num_seqs,
        max_model_len=spec.max_len,
        max_logprobs=config.max_logprobs,
    )
    key = Buckets(num_seqs, num_batched).prompt_logprobs
    memory = forward_program(shapes, key).compile().memory_analysis()
    own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return 2 * own + _num_bytes(shapes.state())  # two steps are in flight; their outputs live side by side


def _device_memory() -> tuple[int, int]:
    """The allocator's limit and what it has given out."""
    stats = jax.devices()[0].memory_stats()
    if not stats:
        raise ConfigError("--kv-cache-memory-bytes: this device does not tell its memory; give the pool's size")
    return stats["bytes_limit"], stats["bytes_in_use"]


def _free_memory(platform: str) -> int:
    if platform != "gpu":
        return available_memory()
    limit, used = _device_memory()
    return limit - used


def _in_tenths(tell: Progress) -> Callable[[int, int], None]:
    """A listener to (bytes read, bytes in all) that speaks up at every tenth."""
    last = 0

    def listen(done: int, total: int) -> None:
        nonlocal last
        if (tenth := 10 * done // total) > last:
            last = tenth
            tell(f"loading weights: {10 * tenth} % of {gib(total)}")

    return listen


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
