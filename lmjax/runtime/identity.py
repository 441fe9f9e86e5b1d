"""What must be equal for an executable to be used again: versions, device, model, settings, sources."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from lmjax.runtime import cards, gpu_settings
from lmjax.runtime.compiler import Program
from lmjax.runtime.platform import cpu_id
from lmjax.runtime.resolve import Resolved

# what programs are made of; the tuned tiles (JSON) lie among the kernels
_SOURCES = ("pallas_kernels", "lmjax/models", "lmjax/nn", "lmjax/parallel", "lmjax/runtime", "lmjax/sampling")
# XLA flags that change no program, those among them that a machine with a card sets by itself
_NEUTRAL_FLAGS = (
    *("--xla_dump", "--xla_gpu_dump_autotune", "--xla_gpu_load_autotune", "--xla_force_host_platform"),
    *(f"--{setting.name}" for setting in gpu_settings.settings(0.0) if setting.is_flag),
)


def identity(resolved: Resolved, devices: list[jax.Device]) -> dict[str, str]:
    """Named facts as text. The pool's size, and the context that was cut to it, are results: a bundle has its own."""
    spec, config = resolved.spec, resolved.config
    return {
        **versions(devices[0]),
        **device_facts(devices[0]),
        "--tensor-parallel-size": str(resolved.degree.tp),
        "--pipeline-parallel-size": str(resolved.degree.pp),
        "--enable-expert-parallel": str(resolved.env.spread_experts),
        "--deterministic": str(resolved.env.tile is not None),
        "attention": str(resolved.env.attention),
        "model": f"{spec.model_type} of {len(spec.layers)} layers, {digest(repr(replace(spec, max_len=0)))}",
        "--max-model-len": str(spec.max_len),
        "--dtype": resolved.dtype,
        "--kv-cache-dtype": ", ".join(str(kv.dtype) for kv in resolved.kv_specs),
        "--block-size": str(config.block_size),
        "--max-num-seqs": str(resolved.num_seqs),
        "--max-num-batched-tokens": str(resolved.num_batched),
        "--enable-lora": "{} slots of rank {}".format(*resolved.adapters) if resolved.adapters else "no",
        "--swap-space": "some" if config.swap_space else "none",
        "--max-logprobs": str(config.max_logprobs),
        "--logprobs-mode": config.logprobs_mode,
        "XLA_FLAGS": xla_flags(),
        "lmjax's sources": sources_digest(),
    }


def versions(device: jax.Device) -> dict[str, str]:
    found = {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}
    return found if device.platform == "cpu" else found | {"plugin": _plugin_version()}


def _plugin_version() -> str:
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def device_facts(device: jax.Device) -> dict[str, str]:
    if device.platform == "cpu":
        return {"device": "cpu", "instruction set": cpu_id()}
    card = cards.card_of(device)
    return {
        "device": card.name if card else device.device_kind,
        "compute capability": str(device.compute_capability),
    }


def xla_flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(sorted(flag for flag in flags if not flag.startswith(_NEUTRAL_FLAGS)))


@cache
def sources_digest() -> str:
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".json")):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def arguments_digest(program: Program) -> str:
    """Of the program's arguments: tree, shapes, dtypes, where they are placed, which are consumed."""
    named = jax.tree_util.tree_leaves_with_path(program.arguments)
    leaves = [(jax.tree_util.keystr(path), str(x.dtype), x.shape, _placement(x)) for path, x in named]
    return digest(repr((leaves, program.donate)))


def _placement(x: Any) -> str:
    """One device is one device, whether it was named or not."""
    sharding = getattr(x, "sharding", None)
    return str(sharding.spec) if sharding is not None and len(sharding.device_set) > 1 else ""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
