"""lmjax: serving large language models with JAX and XLA alone. Names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmjax import functional as functional
    from lmjax.config import EngineConfig as EngineConfig
    from lmjax.engine.async_engine import AsyncEngine as AsyncEngine
    from lmjax.engine.llm import LLM as LLM
    from lmjax.types import RequestOutput as RequestOutput
    from lmjax.types import SamplingParams as SamplingParams

__version__ = "0.1.0"

_MODULES = ("functional",)
_HOMES = {
    "LLM": "lmjax.engine.llm",
    "AsyncEngine": "lmjax.engine.async_engine",
    "EngineConfig": "lmjax.config",
    "SamplingParams": "lmjax.types",
    "RequestOutput": "lmjax.types",
}
__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"lmjax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lmjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
