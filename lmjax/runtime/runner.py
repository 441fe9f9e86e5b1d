"""Whether an engine generates or only pools, and how long its texts may be: settings that the model's files decide."""

from __future__ import annotations

from lmjax.config import ConfigError, EngineConfig
from lmjax.models.registry import is_headless
from lmjax.weights.pooling import Pooling, is_encoder
from lmjax.weights.source import ModelSource


def with_runner(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """``runner`` decided: generate or pooling. Raises ``ConfigError`` for one that the model cannot have."""
    why = None
    if is_encoder(source):
        why = f"a {source.config['model_type']} model is an encoder"
    elif is_headless(source.config):
        why = f"a {source.config['architectures'][0]} has no head to generate with"
    if config.runner == "auto":
        declared = source.kind == "hf" and (source.path / "modules.json").is_file()
        return config.replace(runner="pooling" if why or declared else "generate").validate()
    if config.runner == "generate" and why:
        raise ConfigError(f"--runner: got generate, must be pooling: {why}")
    return config


def with_max_length(config: EngineConfig, pooling: Pooling, longest: int) -> EngineConfig:
    """``max_model_len`` as sentence-transformers cuts texts, where it was not given and nothing is generated.
    longest: the model's own."""
    if config.runner != "pooling" or config.max_model_len is not None or pooling.max_length is None:
        return config
    return config.replace(max_model_len=min(pooling.max_length, longest))
