"""Reads LoRA adapters for an engine's devices."""

from __future__ import annotations

from lmjax.config import ConfigError
from lmjax.runtime.resolve import Resolved, make_spec
from lmjax.types import AdapterError
from lmjax.weights.lora import HostAdapter, read_adapter


class AdapterReader:
    """Called with a path; see ``Executor.read_adapter``.

    Those of the settings are read when it is made: what is wrong with them is told before weights are loaded and
    programs compiled. Raises ``ConfigError``.
    """

    def __init__(self, resolved: Resolved):
        self._resolved = resolved
        self._early: dict[str, HostAdapter] = {}
        for name, path in resolved.config.lora_modules.items():
            try:
                self._early[path] = self._read(path)
            except AdapterError as error:
                raise ConfigError(f"--lora-modules: {name}: {error}") from error

    def __call__(self, path: str) -> HostAdapter:
        return self._early.pop(path, None) or self._read(path)

    def _read(self, path: str) -> HostAdapter:
        config = self._resolved.config
        spec = make_spec(self._resolved.source, config.max_model_len)
        return read_adapter(path, spec, self._resolved.spec, self._resolved.dtype, config.max_lora_rank)
