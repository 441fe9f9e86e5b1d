"""``lmjax compile``: every program of an engine, compiled for a device and written to a bundle."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from lmjax.config import ConfigError, EngineConfig
from lmjax.nn.env import Env
from lmjax.runtime.bundle import Bundle, BundleError, PoolFacts, open_for_writing
from lmjax.runtime.compiler import compile_all
from lmjax.runtime.identity import identity
from lmjax.runtime.memory import available_memory, cpu_pool_budget, plan_kv, pool_bytes, pool_is_set
from lmjax.runtime.plan import Deployment, make_plan
from lmjax.runtime.platform import configure_jax, no_compilation_cache
from lmjax.runtime.programs import all_programs
from lmjax.runtime.resolve import Resolved, model_source, resolve
from pallas_kernels.platform import device_target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """Programs compiled now, and those that were there from an earlier run."""

    path: Path
    compiled: int
    kept: int


def compile_for_cpu(config: EngineConfig, path: str | Path, tell: Callable[[str], None]) -> Written:
    """Writes the programs for this machine's CPU. Raises ``ConfigError``."""
    configure_jax(config)
    devices = jax.devices("cpu")[:1]
    env = Env(device_target(devices[0]), config.attention_backend)  # type: ignore[arg-type]
    resolved = resolve(config, model_source(config), "cpu", env)
    budget = cpu_pool_budget(available_memory())
    plan = plan_kv(
        resolved.kv_specs,
        config,
        model_max_len=resolved.spec.max_len,
        max_num_seqs=resolved.num_seqs,
        max_num_batched_tokens=resolved.num_batched,
        budget=budget,
        available=available_memory(),
    )
    pool = PoolFacts(plan.num_blocks, plan.max_model_len, 0)
    return write(resolved, _earlier_pool(path, resolved, devices, budget) or pool, devices, path, tell)


def compile_for_card(
    deployment: Deployment, path: str | Path, tell: Callable[[str], None], autotune_results: str | None = None
) -> Written:
    """Writes the programs for cards that need not be there. autotune_results: a file that such a card has dumped.

    Raises ``ConfigError``, also where the model does not fit the cards.
    """
    configure_jax(deployment.config)
    plan = make_plan(deployment, None, tell)
    if plan.pool is None:
        raise ConfigError(f"--device: it does not fit {plan.devices} x {plan.card.name}: {plan.refusal}")
    resolved = deployment.resolve()
    assert resolved.placement is not None
    pool = PoolFacts(plan.pool.num_blocks, plan.pool.max_model_len, plan.program_bytes)
    devices = list(resolved.placement.mesh.devices.flat)
    return write(resolved, pool, devices, path, tell, autotune_results)


def _earlier_pool(path: str | Path, resolved: Resolved, devices: list[jax.Device], budget: int) -> PoolFacts | None:
    """Of an earlier run for the same: free memory has changed since, and a pool that still fits need not."""
    try:
        bundle = Bundle.read(path)
    except BundleError:
        return None
    if pool_is_set(resolved.config) or bundle.difference(identity(resolved, devices)):
        return None
    size = pool_bytes(resolved.kv_specs, bundle.pool.num_blocks, resolved.config.block_size)
    return bundle.pool if size <= budget else None


def write(
    resolved: Resolved,
    pool: PoolFacts,
    devices: list[jax.Device],
    path: str | Path,
    tell: Callable[[str], None],
    autotune_results: str | None = None,
) -> Written:
    """Compiles what the bundle at ``path`` does not have yet; each program is kept as soon as it is done."""
    options, made_with = _autotuned(autotune_results)
    shapes = resolved.shapes(pool.num_blocks, pool.max_model_len)
    wanted = all_programs(shapes, resolved.buckets(pool.max_model_len))
    try:
        bundle, replaced = open_for_writing(path, identity(resolved, devices), pool, made_with)
        if replaced:
            tell(f"{path} held a bundle for something else and is made anew: {replaced}")
        missing = {key: program for key, program in wanted.items() if not bundle.has(program)}
        if len(missing) < len(wanted):
            tell(f"{len(wanted) - len(missing)} programs are there from an earlier run")
        if missing:
            tell(f"compiling {len(missing)} programs, the largest first")
            with no_compilation_cache():
                compile_all(missing, tell, lambda key, executable: bundle.add(missing[key], executable), options)
    except (BundleError, OSError) as error:
        raise ConfigError(f"--bundle: {error}") from error
    except jax.errors.JaxRuntimeError as error:
        if autotune_results is None or "autotune" not in str(error):
            raise
        raise ConfigError(f"--autotune-results: {autotune_results}: {str(error).splitlines()[0]}") from error
    return Written(bundle.path, len(missing), len(wanted) - len(missing))


def _autotuned(path: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """XLA's option for a file of autotune results, and what the bundle says of it."""
    if path is None:
        return {}, {"autotune results": "none"}
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"--autotune-results: {path}: {error.strerror}") from error
    where = str(Path(path).expanduser().resolve())
    return {"xla_gpu_load_autotune_results_from": where}, {"autotune results": hashlib.sha256(content).hexdigest()[:16]}
