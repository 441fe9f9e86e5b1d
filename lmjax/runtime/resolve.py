"""Settings and a model's config.json resolved into what programs are made of. No weights are read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from lmjax.config import FLOATS, ConfigError, EngineConfig
from lmjax.models import decoder
from lmjax.models.registry import dtype_from_hf, spec_from_hf
from lmjax.models.spec import DecoderSpec, MoeSpec
from lmjax.nn.env import ALONE, Env
from lmjax.nn.tiles import least_width, tile_width
from lmjax.parallel.placement import Placement
from lmjax.parallel.split import Degree, SplitError, spread
from lmjax.runtime.buckets import GPU_SAMPLERS, SAMPLERS, Buckets, ForwardKey
from lmjax.runtime.compiler import Program, compile_all
from lmjax.runtime.plan_costs import bytes_per_device
from lmjax.runtime.programs import Shapes, forward_program, sample_program
from lmjax.runtime.quantization import packed_spec
from lmjax.runtime.state import COPY_BATCH, MOST_WAITING, SWAP_BATCH
from lmjax.types import KVSpec
from lmjax.weights.errors import WeightError
from lmjax.weights.quant import without
from lmjax.weights.source import ModelSource, resolve_model
from pallas_kernels.paged_attention import choose as choose_attention


@dataclass(frozen=True)
class Resolved:
    """A model with every default of its settings filled in, but for the size of the KV pool.

    ``spec``: for the context length that was asked for, and what all devices of the placement hold together, as
    ``kv_specs``. ``num_batched``: the token budget of a step.
    """

    config: EngineConfig
    source: ModelSource
    platform: str
    spec: DecoderSpec
    dtype: str
    kv_specs: tuple[KVSpec, ...]
    num_seqs: int
    num_batched: int
    env: Env = ALONE
    placement: Placement | None = None

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.placement.mesh.devices.flat) if self.placement else jax.devices()[:1]

    @property
    def local_devices(self) -> list[jax.Device]:
        """Those of this process."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @property
    def num_devices(self) -> int:
        return self.placement.size if self.placement else 1

    @property
    def processed_logprobs(self) -> bool:
        return self.config.logprobs_mode == "processed_logprobs"

    @property
    def pools_only(self) -> bool:
        return self.config.runner == "pooling"

    @property
    def adapters(self) -> tuple[int, int] | None:
        """See ``Shapes``."""
        config = self.config
        return (config.max_loras, config.max_lora_rank) if config.enable_lora else None

    @property
    def degree(self) -> Degree:
        return self.placement.degree if self.placement else Degree()

    @property
    def device_kv_specs(self) -> tuple[KVSpec, ...]:
        """The KV groups as one device holds them."""
        if self.placement is None:
            return self.kv_specs
        return decoder.kv_specs(self.placement.share(self.spec), self.kv_specs[0].dtype)

    def shapes(self, num_blocks: tuple[int, ...], max_model_len: int) -> Shapes:
        """For a pool of ``num_blocks`` and the context length that it was sized for."""
        return Shapes(
            # some rotary embeddings depend on the served length
            spec=self.spec if max_model_len == self.spec.max_len else self._spec(max_model_len),
            dtype=self.dtype,
            kv_specs=self.kv_specs,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.num_seqs,
            max_model_len=max_model_len,
            max_logprobs=self.config.max_logprobs,
            env=self.env,
            host_tier=self.config.swap_space > 0,
            placement=self.placement,
            most_tokens=self.buckets(max_model_len).token_buckets[-1],
            processed_logprobs=self.processed_logprobs,
            adapters=self.adapters,
        )

    def model_spec(self, max_model_len: int | None) -> DecoderSpec:
        """The model's own, not spread over devices."""
        spec = make_spec(self.source, max_model_len)
        return packed_spec(spec, self.config, self.source, self.platform, self.env.target, self.degree)

    def _spec(self, max_model_len: int) -> DecoderSpec:
        spec = self.model_spec(max_model_len)
        return self.placement.spread(spec) if self.placement else spec

    def buckets(self, max_model_len: int) -> Buckets:
        """Those of one step. With pipeline stages as many are under way, and they share the limits."""
        budget = min(self.num_batched, self.num_seqs * max_model_len)
        stages, samplers = self.spec.stages, GPU_SAMPLERS if self.platform == "gpu" else SAMPLERS
        seqs, tokens, processed = -(-self.num_seqs // stages), -(-budget // stages), self.processed_logprobs
        if self.env.tile is None:
            lora = self.config.enable_lora
            return Buckets(seqs, tokens, samplers, processed, pooled=self.pools_only, adapters=lora)
        # one program for all that is drawn at random, whatever its neighbours ask for, and one with adapters or without
        return Buckets(
            seqs,
            tokens,
            SAMPLERS,
            processed,
            self.env.tile,
            least_width(self.env.target),
            pooled=self.pools_only,
            adapters="always" if self.config.enable_lora else False,
        )


def resolve(
    config: EngineConfig,
    source: ModelSource,
    platform: str,
    env: Env = ALONE,
    placement: Placement | None = None,
) -> Resolved:
    """platform: "cpu" or "gpu". env: what the programs are traced for; placement: None for the default device.

    Raises ``ConfigError`` for settings that don't fit the model.
    """
    spec = make_spec(source, config.max_model_len)
    if config.enable_expert_parallel and not any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        raise ConfigError(f"--enable-expert-parallel: a {spec.model_type} model has no experts")
    if config.enable_lora and any(layer.attention.latent for layer in spec.layers):
        raise ConfigError(f"--enable-lora: not built for latent attention, which a {spec.model_type} model has")
    degree = placement.degree if placement else Degree()
    spec = packed_spec(spec, config, source, platform, env.target, degree)
    if placement:
        spec = spread_spec(spec, placement.degree)
    if config.deterministic:
        if any(layer.attention.latent for layer in spec.layers):
            raise ConfigError(f"--deterministic: a {spec.model_type} model's bits depend on the step: not supported")
        env = replace(env, tile=tile_width(env.target))
    dtype, kv_dtype = resolve_dtype(config, source, platform), config.kv_cache_dtype
    resolved = Resolved(
        config=config,
        source=source,
        platform=platform,
        spec=spec,
        dtype=dtype,
        kv_specs=decoder.kv_specs(spec, {"auto": dtype, "fp8": "float8_e4m3fn"}.get(kv_dtype, kv_dtype)),
        num_seqs=config.max_num_seqs or (256 if platform == "gpu" else 64),
        num_batched=_token_budget(config, spec, platform, env),
        env=env,
        placement=placement,
    )
    attention_bodies(resolved)
    return resolved


def spread_spec(spec: DecoderSpec, degree: Degree) -> DecoderSpec:
    """``parallel.split.spread`` whose errors name the flag."""
    try:
        return spread(spec, degree)
    except SplitError as error:
        raise ConfigError(f"--{error.axis}-parallel-size: {error}") from error


def attention_bodies(resolved: Resolved) -> tuple[str, ...]:
    """By KV group, what computes attention: "xla", "triton" or "mosaic". ``ConfigError`` for a case that it does not
    serve, in one line and before anything is loaded or compiled."""
    spec, env = resolved.spec, resolved.env
    if resolved.placement:  # kernels see one device's share
        spec = resolved.placement.share(spec)
    found = []
    for kv in resolved.device_kv_specs:
        pool = jax.ShapeDtypeStruct(decoder.pool_shape(kv, 2, resolved.config.block_size), jnp.dtype(kv.dtype))
        heads = spec.layers[kv.layers[0]].attention.heads
        q = jax.ShapeDtypeStruct((1, heads, kv.k_dim), jnp.dtype(resolved.dtype))
        try:
            found.append(choose_attention(q, pool, target=env.target, backend=env.attention))
        except NotImplementedError as error:
            if kv.scaled and env.attention == "auto":
                raise ConfigError(f"--kv-cache-dtype: got {resolved.config.kv_cache_dtype}: {error}") from error
            raise ConfigError(f"--attention-backend: got {env.attention}: {error}") from error
    return tuple(found)


def model_source(config: EngineConfig) -> ModelSource:
    """The model; its config.json alone is enough of it. Raises ``WeightError``."""
    overrides = config.hf_overrides or None
    return resolve_model(config.model, config.revision, config.download_dir, overrides, config_only=True)


def make_spec(source: ModelSource, max_model_len: int | None) -> DecoderSpec:
    """Raises ``WeightError`` where config.json is at fault, ``ConfigError`` where a setting is."""
    try:
        # what files quantise is a matter of their reader; weights in memory are what they are
        return spec_from_hf(without(source.config) if source.kind != "arrays" else source.config, max_model_len)
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        if name == "max_model_len":
            raise ConfigError(f"--max-model-len:{rest}") from error
        if source.kind == "arrays":
            raise ConfigError(f"config: {error}") from error
        if name.split(".")[0] in source.overridden:
            raise ConfigError(f"--hf-overrides: {error}") from error
        raise WeightError(source.config_file, str(error)) from error


def resolve_dtype(config: EngineConfig, source: ModelSource, platform: str) -> str:
    if config.dtype != "auto":
        return config.dtype
    if platform == "cpu":
        return "float32"  # a CPU converts narrower weights again on every call
    dtype = dtype_from_hf(source.config) or "bfloat16"
    if dtype not in FLOATS:
        field = "dtype" if source.config.get("dtype") else "torch_dtype"
        allowed = f"must be one of {', '.join(FLOATS)}; or give --dtype"
        if field in source.overridden:
            raise ConfigError(f"--hf-overrides: {field}: got {dtype!r}, {allowed}")
        raise WeightError(source.config_file, f"{field}: got {dtype!r}, {allowed}")
    return dtype


def _token_budget(config: EngineConfig, spec: DecoderSpec, platform: str, env: Env) -> int:
    wanted, multiple = config.max_num_batched_tokens, env.tile or 1
    if wanted is not None and env.tile and (wanted % multiple or wanted < least_width(env.target)):
        raise ConfigError(
            f"--max-num-batched-tokens: got {wanted}, must be a multiple of {multiple} from "
            f"{least_width(env.target)} on with --deterministic"
        )
    if config.enable_chunked_prefill:
        return config.max_num_batched_tokens or (2048 if platform == "gpu" else 512)
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < spec.max_len:
        raise ConfigError(
            f"--max-num-batched-tokens: got {config.max_num_batched_tokens}, must be at least the context length "
            f"({spec.max_len}) where chunked prefill is switched off"
        )
    return config.max_num_batched_tokens or -(-spec.max_len // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes on one device beside the arguments, as XLA plans them. ``outputs``: but for updated arguments."""

    temporaries: int
    outputs: int

    @staticmethod
    def of(executable: Any) -> ProgramMemory:
        memory = executable.memory_analysis()
        return ProgramMemory(memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes)


def step_bytes(shapes: Shapes, programs: Mapping[Hashable, ProgramMemory]) -> int:
    """What a step needs beside weights, state and pools. programs: the largest forward and sample programs.

    Two steps are in flight: their outputs live side by side. Temporaries don't, programs run one after the other.
    """
    logits = max((m.outputs for key, m in programs.items() if isinstance(key, ForwardKey)), default=0)
    largest = max(m.temporaries + (0 if isinstance(key, ForwardKey) else 2 * m.outputs) for key, m in programs.items())
    return 2 * logits + max(largest, _copied_bytes(shapes))


def _copied_bytes(shapes: Shapes) -> int:
    """What the program that copies blocks holds on to, the transfers to and from the host that wait, and an adapter on
    its way into its slot."""
    block = sum(kv.bytes_per_token() for kv in shapes.kv_specs) * shapes.block_size
    blocks = COPY_BATCH + (2 * (MOST_WAITING + 1) * SWAP_BATCH if shapes.host_tier else 0)
    devices = shapes.placement.size if shapes.placement else 1
    return blocks * block // devices + bytes_per_device(shapes.loras(slots=1), devices)


def program_bytes(resolved: Resolved) -> int:
    """``step_bytes``, measured by compiling the largest programs. They need the same whatever the pool's size."""
    shapes = resolved.shapes(tuple(2 for _ in resolved.kv_specs), resolved.spec.max_len)
    buckets = resolved.buckets(resolved.spec.max_len)
    largest = max(buckets.every_forward, key=lambda key: (key.prompt_logprobs, key.num_tokens, key.adapters))
    programs: dict[Hashable, Program] = {largest: forward_program(shapes, largest)}
    if buckets.sample:
        sample = max(buckets.sample, key=lambda key: (key.num_rows, key.level, key.logprobs))
        programs[sample] = sample_program(shapes, sample)
    done = compile_all(programs, None)
    return step_bytes(shapes, {key: ProgramMemory.of(executable) for key, executable in done.items()})
