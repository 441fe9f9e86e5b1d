"""How XLA is set for serving on NVIDIA cards: every setting with its reason. ``LMJAX_GPU_SETTINGS=off`` leaves XLA
alone, and what the user has set in the environment or names in XLA_FLAGS always wins.

Left as XLA has them, on purpose:
- command buffers (CUDA graphs) are on: a decode step without collectives is one graph. Should a card hang or crash in
  them, ``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` is the off switch. ``=+COLLECTIVES`` makes a step on several
  cards one graph, too, but has been seen to hang after hundreds of steps: nobody gets it unasked.
- autotuning is on, and its results are kept beside the compile cache, so a second start tunes nothing.
- the latency hiding scheduler is off: a decode step has nothing to hide a reduce behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from lmjax.nn.env import Env

log = logging.getLogger(__name__)

SWITCH = "LMJAX_GPU_SETTINGS"


@dataclass(frozen=True, slots=True)
class Setting:
    """``name``: an environment variable, or an XLA flag (without dashes)."""

    name: str
    value: str
    reason: str

    @property
    def is_flag(self) -> bool:
        return self.name.startswith("xla_")


def settings(gpu_memory_utilization: float) -> tuple[Setting, ...]:
    return (
        Setting(
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            str(gpu_memory_utilization),
            "one allocation for weights, pool and temporaries; JAX would take 75 % of the card",
        ),
        Setting(
            "LLVM_DISABLE_SYMBOLIZATION",
            "1",
            "where llvm-symbolizer is installed, XLA's compiler names stack traces that nobody sees: 3 s become 27",
        ),
        Setting("NCCL_DEBUG", "WARN", "a failed collective is explained in the log"),
        Setting(
            "xla_gpu_nccl_termination_timeout_seconds",
            "600",
            "the last resort: without it a rank waits for a dead one for ever",
        ),
        Setting(
            "xla_gpu_first_collective_call_terminate_timeout_seconds",
            "600",
            "ranks reach their first collective minutes apart where one has to compile; XLA would end them after 40 s",
        ),
    )


# of every program of --deterministic, beside whatever XLA_FLAGS says
DETERMINISTIC = (
    # timings decide what autotuning takes: another start, or another replica, could take another kernel or split K
    ("xla_gpu_autotune_level", 0),
    # no atomic additions of floats, whose order is that of arrival
    ("xla_gpu_exclude_nondeterministic_ops", True),
)


def program_options(env: Env) -> tuple[tuple[str, Any], ...]:
    """XLA's options of one forward or sample program."""
    return DETERMINISTIC if env.tile is not None and env.target.platform == "cuda" else ()


SEVERAL_HOSTS = Setting(
    "xla_gpu_shard_autotuning",
    "false",
    "each rank tunes by itself: else one whose compile cache is cold waits for ever for one whose cache is warm",
)


def apply(
    gpu_memory_utilization: float, environ: MutableMapping[str, str] = os.environ, nnodes: int = 1
) -> list[Setting]:
    """Sets what is not set yet; returns what it has set. Read when JAX's backend starts, so call it before."""
    if environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        return []
    applied = []
    for setting in (*settings(gpu_memory_utilization), *((SEVERAL_HOSTS,) if nnodes > 1 else ())):
        if setting.is_flag:
            flags = environ.get("XLA_FLAGS", "")
            if f"--{setting.name}=" in flags or f"--{setting.name} " in flags + " ":
                continue
            environ["XLA_FLAGS"] = f"{flags} --{setting.name}={setting.value}".strip()
        elif setting.name in environ:
            continue
        else:
            environ[setting.name] = setting.value
        applied.append(setting)
    for setting in applied:
        log.debug("%s=%s: %s", setting.name, setting.value, setting.reason)
    return applied
