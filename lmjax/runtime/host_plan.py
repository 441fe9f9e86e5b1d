"""The host tier's size, and what its transfers and a prompt token cost before the engine has measured them."""

from __future__ import annotations

from lmjax.config import ConfigError, EngineConfig
from lmjax.core.plan import HostTierInfo
from lmjax.runtime.device import Device
from lmjax.runtime.host_pool import measure
from lmjax.runtime.memory import GIB, gib, pool_bytes
from lmjax.runtime.plan_costs import weights_of
from lmjax.runtime.resolve import Resolved
from lmjax.runtime.state import SWAP_BATCH

# operations and bytes a second that a step reaches, to begin with
_SPEED = {"cpu": (1e11, 2e10), "gpu": (2e14, 2e12)}


def without_swap_space(config: EngineConfig, available: int, share: float) -> int:
    """What the host tier leaves of so many bytes of a host's memory. ``share``: of the engine's devices that are there.

    Raises ``ConfigError`` where it is larger.
    """
    left = available - int(share * config.swap_space * GIB)
    if left < 0:
        raise ConfigError(
            f"--swap-space: got {config.swap_space:g} GiB, but only {gib(available)} of host memory are free"
        )
    return left


def plan_host(resolved: Resolved, num_blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Places per group, the null block included, in proportion to the device's ``num_blocks``; empty without a tier.

    Raises ``ConfigError`` where there is no room for a block.
    """
    config = resolved.config
    if not config.swap_space:
        return ()
    wanted, size = int(config.swap_space * GIB), pool_bytes(resolved.kv_specs, num_blocks, config.block_size)
    places = tuple(n * wanted // size for n in num_blocks)
    if min(places) < 2:
        least = max(-(-2 * size // n) for n in num_blocks)
        raise ConfigError(f"--swap-space: got {config.swap_space:g} GiB, must be 0 or at least {gib(least)}")
    return places


def host_tier(resolved: Resolved, device: Device, num_blocks: tuple[int, ...]) -> HostTierInfo:
    """Measures the transfers; the rest is arithmetic on the model."""
    spec, devices = resolved.spec, resolved.num_devices
    weights = weights_of(spec, resolved.dtype, resolved.degree)
    operations, bandwidth = _SPEED["gpu" if resolved.platform == "gpu" else "cpu"]
    flops = spec.stages * sum(layer.attention.flops_per_key for layer in spec.layers)
    out, back = measure(device, spec.stages, len(num_blocks))
    return HostTierInfo(
        num_blocks=num_blocks,
        batch=SWAP_BATCH,
        out_seconds=out,
        in_seconds=back,
        step_seconds=weights.bytes_read(1) / bandwidth,
        token_seconds=weights.flops(1, 0) / operations,
        pair_seconds=flops / devices / operations,
    )
