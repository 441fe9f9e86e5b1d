"""From a configuration to a ready executor: resolve, load, size, compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from lmjax.cluster.ranks import Ranks, join
from lmjax.config import ConfigError, EngineConfig
from lmjax.core.plan import ExecutorInfo
from lmjax.nn.env import Env
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.parallel.split import Degree
from lmjax.runtime.adapt import Adapter
from lmjax.runtime.adapters import AdapterReader
from lmjax.runtime.bundle import Bundle, load_programs, not_used, usable_bundle
from lmjax.runtime.compiler import CompileMonitor, Program, compile_all
from lmjax.runtime.device import Device
from lmjax.runtime.encoder import EncoderExecutor, build_encoder
from lmjax.runtime.host_plan import host_tier, plan_host, without_swap_space
from lmjax.runtime.inputs import InputPacker
from lmjax.runtime.jax_executor import JaxExecutor, ModelInfo
from lmjax.runtime.live import load_beside, read_weights, zeros
from lmjax.runtime.memory import (
    KVPlan,
    available_memory,
    check_weights_fit,
    cpu_pool_budget,
    gib,
    gpu_pool_budget,
    plan_kv,
    pool_bytes,
    pool_is_set,
)
from lmjax.runtime.pipeline_executor import PipelineExecutor
from lmjax.runtime.plan_costs import bytes_per_device, weights_of
from lmjax.runtime.platform import (
    configure_jax,
    describe_platform,
    own_context,
    use_compilation_cache,
    writing_to_own_cache,
)
from lmjax.runtime.programs import all_programs
from lmjax.runtime.progress import loading_bar
from lmjax.runtime.ranks import (
    Follower,
    Leader,
    check_equal,
    engine_devices,
    first_collective,
    rank_facts,
    sharing,
    smallest,
)
from lmjax.runtime.resolve import Resolved, make_spec, program_bytes, resolve, spread_spec
from lmjax.runtime.runner import with_max_length, with_runner
from lmjax.weights.given import NOTHING, Given
from lmjax.weights.packing import packings
from lmjax.weights.pooling import is_encoder, read_pooling
from lmjax.weights.source import ModelSource, resolve_model
from lmjax.weights.trees import check_names
from pallas_kernels.platform import Target, device_target

log = logging.getLogger(__name__)

Progress = Callable[[str], None]


def build_executor(
    config: EngineConfig,
    progress: Progress | None = None,
    target: Target | None = None,
    given: Given = NOTHING,
) -> JaxExecutor | EncoderExecutor:
    """Loads the model and compiles everything; when it returns, nothing is left to compile.

    progress: is told what is being done. target: what kernels are chosen for, if not for the device. given: weights and
    devices of the caller. Raises ``ConfigError`` for settings that don't fit the model or the machine and
    ``WeightError`` for a model that cannot be read.
    """
    tell = progress or (lambda message: None)
    source = given.source or find_model(config)
    if is_encoder(source):
        if config.enable_lora:
            raise ConfigError("--enable-lora: is for decoders, and this model is an encoder")
        with own_context():
            return _build_encoder(with_runner(config, source), source, given, tell)
    with own_context():
        made = _prepare(config, source, tell, target, given)
    resolved, plan = made.resolved, made.plan
    spec, kv_specs, buckets = resolved.spec, resolved.kv_specs, resolved.buckets(plan.max_model_len)
    make = JaxExecutor if spec.stages == 1 else partial(PipelineExecutor, buckets=buckets)
    return make(
        info=ExecutorInfo(
            kv_specs=kv_specs,
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            max_num_seqs=resolved.num_seqs,
            max_model_len=plan.max_model_len,
            vocab_size=spec.vocab,
            max_logprobs=config.max_logprobs,
            logprobs_mode=config.logprobs_mode,
            generates=not resolved.pools_only,
            pooled_width=spec.hidden,
            token_buckets=buckets.token_buckets,
            stages=spec.stages,
            host=host_tier(resolved, made.device, made.host_blocks) if made.host_blocks else None,
            max_loras=config.max_loras if config.enable_lora else 0,
        ),
        model_info=ModelInfo(
            path=str(resolved.source.path),
            model_type=spec.model_type,
            dtype=resolved.dtype,
            platform=resolved.platform,
            device_count=made.device_count,
            config=resolved.source.config,
            generation_config=resolved.source.generation_config,
        ),
        device=Leader(made.device, made.ranks) if made.ranks else made.device,
        packer=InputPacker(
            buckets,
            max_num_seqs=resolved.num_seqs,
            block_size=config.block_size,
            num_groups=len(kv_specs),
        ),
        monitor=CompileMonitor(config.require_warm),
        adapter=made.adapter,
        packed=bool(packings(spec)),
        from_files=given.source is None,
        functional=_functional(resolved),
        read_adapter=made.read_adapter,
    )


def _functional(resolved: Resolved) -> dict[str, Any] | None:
    if resolved.num_devices > 1:
        return None
    return {"spec": resolved.model_spec(resolved.config.max_model_len), "env": resolved.env}


def build_follower(config: EngineConfig, progress: Progress | None = None) -> Follower:
    """As ``build_executor``, on the ranks that run what rank 0's executor does."""
    made = _prepare(config, find_model(config), progress or (lambda message: None), None, NOTHING)
    assert made.ranks is not None
    return Follower(made.device, made.ranks, CompileMonitor(config.require_warm))


def pooling_settings(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """With what the model's files say of pooling, where the settings leave it open."""
    config = with_runner(config, source)
    pooling = read_pooling(source, config)
    return with_max_length(config, pooling, make_spec(source, None).max_len)


class _Made(NamedTuple):
    resolved: Resolved
    plan: KVPlan
    device: Device
    host_blocks: tuple[int, ...]
    device_count: int
    ranks: Ranks | None
    adapter: Adapter | None  # None: the weights are spread over processes
    read_adapter: AdapterReader | None  # None: there are no LoRA adapters


def find_model(config: EngineConfig) -> ModelSource:
    return resolve_model(config.model, config.revision, config.download_dir, config.hf_overrides or None)


def _build_encoder(config: EngineConfig, source: ModelSource, given: Given, tell: Progress) -> EncoderExecutor:
    if given.devices:
        raise ConfigError("mesh: is for decoders; an encoder runs on one device")
    configure_jax(config)
    use_compilation_cache(config)
    platform, device_count = describe_platform()
    return build_encoder(config, source, platform, device_count, tell)


def _prepare(config: EngineConfig, source: ModelSource, tell: Progress, target: Target | None, given: Given) -> _Made:
    config.validate()
    configure_jax(config)
    ranks = join(config, tell)
    use_compilation_cache(config)
    platform, device_count = describe_platform()
    config = pooling_settings(config, source)
    _check_platform(given.devices)
    resolved = _resolve(config, source, platform, target or device_target(jax.local_devices()[0]), given.devices)
    reader = AdapterReader(resolved) if config.enable_lora else None
    adapter = None if ranks else _adapter(resolved, given)
    spec, dtype = resolved.spec, resolved.dtype
    if ranks:
        check_equal(ranks, rank_facts(resolved))
    if given.source:
        assert adapter is not None
        check_names(given.params, given.names)
        weights = adapter.missing_bytes(given.params)
    else:
        weights = weights_of(spec, dtype, resolved.degree).bytes
    weights += bytes_per_device(resolved.shapes((), spec.max_len).loras(), resolved.num_devices)
    check_weights_fit(weights * (1 if platform == "gpu" else sharing(resolved, ranks)), _free_memory(resolved))
    without_swap_space(config, available_memory(), sharing(resolved, ranks) / resolved.num_devices)
    bundle = usable_bundle(resolved, resolved.devices, tell)
    if given.source:
        params = _take(adapter, given, tell)
    else:
        tell("loading weights")
        params = _load(resolved)

    loras = zeros(resolved.shapes((), resolved.spec.max_len).loras()) if config.enable_lora else None
    tell("sizing the KV pool")
    plan, bundle = plan_memory(resolved, bundle, tell, ranks)
    host_blocks = plan_host(resolved, plan.num_blocks)
    shapes = resolved.shapes(plan.num_blocks, plan.max_model_len)
    buckets = resolved.buckets(plan.max_model_len)
    with writing_to_own_cache():
        programs = _make_programs(all_programs(shapes, buckets), bundle, resolved.devices, tell)
    if ranks:
        assert resolved.placement is not None
        first_collective(ranks, resolved.placement.mesh)
    tell("allocating the KV pool")
    # the pools come last: what compiling took is free again, and they are never moved
    num_sharing = 1 if platform == "gpu" else sharing(resolved, ranks)
    load = partial(load_beside, resolved, num_sharing, partial(_free_memory, resolved))
    device = Device(params, zeros(shapes.pools()), zeros(shapes.state()), programs, host_blocks, load, loras)
    return _Made(resolved, plan, device, host_blocks, device_count, ranks, adapter, reader)


def _check_platform(devices: Sequence[jax.Device]) -> None:
    used = jax.local_devices()[0].platform
    if devices and devices[0].platform != used:
        raise ConfigError(f"mesh: has {devices[0].platform} devices, must be of JAX's default platform ({used})")


def _resolve(
    config: EngineConfig, source: ModelSource, platform: str, target: Target, devices: Sequence[jax.Device] = ()
) -> Resolved:
    """devices: of the caller's mesh, if there is one."""
    attention: Any = config.attention_backend
    count = config.num_devices
    if count == 1 and list(devices) in ([], jax.devices()[:1]):
        return resolve(config, source, platform, Env(target, attention))
    # first what no number of devices would help
    degree = Degree(config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)
    spread_spec(make_spec(source, config.max_model_len), degree)
    mesh = make_mesh(devices or engine_devices(config), config.pipeline_parallel_size)
    placement = Placement(mesh, config.enable_expert_parallel)
    return resolve(config, source, platform, placement.env(target, attention), placement)


def _adapter(resolved: Resolved, given: Given) -> Adapter:
    wanted = resolved.shapes((), resolved.spec.max_len).params()
    spec = make_spec(resolved.source, resolved.config.max_model_len)
    return Adapter(spec, resolved.spec, wanted, resolved.devices[0], given.names)


def _take(adapter: Adapter | None, given: Given, tell: Progress) -> Any:
    assert adapter is not None
    found = adapter.adapt(given.params)
    tell(
        f"weights from memory: {found.kept} arrays taken as they are, {found.converted} converted "
        f"({gib(found.converted_bytes)} in {found.seconds:.1f} s)"
    )
    return found.params


def _load(resolved: Resolved) -> Any:
    with loading_bar(shown=not resolved.config.node_rank) as listen:
        return read_weights(resolved, resolved.source, resolved.config.load_format, listen)


def plan_memory(
    resolved: Resolved, bundle: Bundle | None, tell: Progress, ranks: Ranks | None = None
) -> tuple[KVPlan, Bundle | None]:
    """The pool's size, and the bundle if its programs are for that size: it has the last word where its pool fits.

    Of several ranks the one with the least room decides.
    """
    config, platform = resolved.config, resolved.platform
    available = _free_memory(resolved)
    if platform == "gpu":
        limit, used = _device_memory(resolved.local_devices)
        budget = gpu_pool_budget(limit, used, bundle.pool.program_bytes if bundle else program_bytes(resolved))
    else:
        num_sharing = sharing(resolved, ranks)
        available = without_swap_space(config, available, num_sharing / resolved.num_devices)
        budget = cpu_pool_budget(available) // num_sharing
        available //= num_sharing
    kv_specs = resolved.device_kv_specs

    def size(num_blocks: tuple[int, ...] | None = None) -> KVPlan:
        return plan_kv(
            kv_specs,
            config,
            model_max_len=resolved.spec.max_len,
            max_num_seqs=resolved.num_seqs,
            max_num_batched_tokens=resolved.num_batched,
            budget=budget,
            available=available,
            num_blocks=num_blocks,
        )

    plan = size()
    if ranks:
        plan = size(smallest(ranks, "blocks", plan.num_blocks))
    if bundle and plan.num_blocks != bundle.pool.num_blocks:
        wanted, room = pool_bytes(kv_specs, bundle.pool.num_blocks, config.block_size), plan.num_bytes
        try:
            if wanted > budget or pool_is_set(config):
                raise ConfigError(f"its KV pool takes {gib(wanted)}, the settings and free memory give {gib(room)}")
            plan = size(bundle.pool.num_blocks)
        except ConfigError as error:
            tell(not_used(bundle, str(error)))
            bundle = None
    log.info(
        "KV pool: %d tokens in blocks of %d (%s%s); %.1f requests of the full %d tokens fit at once",
        plan.num_tokens,
        config.block_size,
        gib(plan.num_bytes),
        f" on each of {resolved.num_devices} devices" if resolved.placement else "",
        plan.num_tokens / plan.max_model_len,
        plan.max_model_len,
    )
    return plan, bundle


def _make_programs(
    wanted: dict[Hashable, Program], bundle: Bundle | None, devices: list[jax.Device], tell: Progress
) -> dict[Hashable, Any]:
    """The executables, from the bundle where it has them. A program that cannot be loaded is compiled."""
    loaded: dict[Hashable, Any] = {}
    if bundle:
        loaded, failed = load_programs(bundle, wanted, devices)
        for name, reason in failed.items():
            log.warning("bundle %s: %s is compiled: %s", bundle.path, name, reason)
        tell(f"bundle {bundle.path}: {len(loaded)} programs loaded, {len(failed)} to compile")
    rest = {key: program for key, program in wanted.items() if key not in loaded}
    if rest:
        tell(f"compiling {len(rest)} programs, the largest first")
        loaded |= compile_all(rest, tell)
    return loaded


def _device_memory(devices: list[jax.Device]) -> tuple[int, int]:
    """The allocator's limit and what it has given out, on the device with the least left."""
    found = []
    for device in devices:
        stats = device.memory_stats()
        if not stats:
            raise ConfigError("--kv-cache-memory-bytes: this device does not tell its memory; give the pool's size")
        found.append((stats["bytes_limit"], stats["bytes_in_use"]))
    return min(found, key=lambda pair: pair[0] - pair[1])


def _free_memory(resolved: Resolved) -> int:
    """On each device; CPU devices share what there is."""
    if resolved.platform != "gpu":
        return available_memory()
    limit, used = _device_memory(resolved.local_devices)
    return limit - used
