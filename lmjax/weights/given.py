"""What a caller brings instead of files: weights in memory, and the devices to put them on.

No jax here: a front end in a process of its own imports this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmjax.config import ConfigError, EngineConfig, flag
from lmjax.weights.source import ModelSource

# settings of files, that have no meaning for weights in memory
_OF_FILES = ("revision", "download_dir", "load_format")


@dataclass(frozen=True, slots=True)
class Given:
    """``source``: of kind ``arrays``, None if the weights come from files. ``params``, ``names``: see
    ``weights.trees.read_tree``. ``devices``: of the caller's mesh, in the engine's order; empty: JAX's first ones."""

    source: ModelSource | None = None
    params: Any = None
    names: Any = None
    devices: tuple[Any, ...] = ()


NOTHING = Given()


def from_memory(params: Any, model_config: Any, names: Any, config: EngineConfig) -> Given:
    """model_config: a config.json as a dict, or transformers' ``PretrainedConfig``. Raises ``ConfigError``."""
    for name in _OF_FILES:
        if getattr(config, name) != getattr(EngineConfig, name):
            raise ConfigError(f"{flag(name)}: is about files, but the weights are given as params")
    if config.nnodes > 1:
        raise ConfigError(f"--nnodes: got {config.nnodes}, but params are weights of one process")
    values = hf_dict(model_config) | config.hf_overrides
    path = Path(str(values.get("_name_or_path") or "params"))
    return Given(ModelSource(path, "arrays", values, {}, path), params, names)


def hf_dict(model_config: Any) -> dict[str, Any]:
    """As config.json has it."""
    to_dict = getattr(model_config, "to_dict", None)
    values = to_dict() if callable(to_dict) else model_config
    if not isinstance(values, Mapping) or "model_type" not in values:
        raise ConfigError(
            f"config: got {type(model_config).__name__}, must be the content "
            "of a config.json (a dict with model_type) or a PretrainedConfig of transformers"
        )
    return dict(values)
