"""``lmjax plan`` and ``lmjax compile`` in the terminal."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from lmjax.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from lmjax.runtime.plan import Deployment

CPU = "cpu"  # of compile: this machine's


def plan(config: EngineConfig, device: str, length: int | None, as_json: bool) -> int:
    """Prints the plan. Exit code: 0 it fits, 1 it does not."""
    _use_cpu()
    from lmjax.runtime.plan import make_plan
    from lmjax.runtime.plan_report import to_json, to_text
    from lmjax.runtime.platform import configure_jax

    if length is not None and length < 1:
        raise ConfigError(f"--length: got {length}, must be at least 1")
    configure_jax(config)
    found = make_plan(_deployment(config, device), length, _tell)
    sys.stdout.write(json.dumps(to_json(found), indent=1) + "\n" if as_json else to_text(found))
    return 0 if found.refusal is None else 1


def compile(config: EngineConfig, device: str, autotune_results: str | None) -> int:
    """Writes the bundle of ``--bundle``."""
    if config.bundle is None:
        raise ConfigError("--bundle: is missing; where shall the executables go?")
    _use_cpu()
    from lmjax.runtime.compile_bundle import compile_for_card, compile_for_cpu

    if device == CPU:
        if config.num_devices > 1 or autotune_results is not None:
            raise ConfigError("--device: cpu is one device, and is not tuned")
        written = compile_for_cpu(config, config.bundle, _tell)
    else:
        written = compile_for_card(_deployment(config, device), config.bundle, _tell, autotune_results)
    print(f"{written.path}: {written.compiled} programs compiled, {written.kept} kept from an earlier run")
    return 0


def _use_cpu() -> None:
    """Nothing here runs on a card, and one that is there may be busy."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def _deployment(config: EngineConfig, device: str) -> Deployment:
    from lmjax.parallel.split import Degree
    from lmjax.runtime.cards import card
    from lmjax.runtime.plan import Deployment
    from lmjax.runtime.resolve import model_source

    found = card(device)
    degree = Degree(config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)
    return Deployment(config, model_source(config), found, degree)


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
