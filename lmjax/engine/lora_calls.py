"""``LLM.load_lora``, ``LLM.unload_lora`` and the names of adapters that its calls take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmjax.engine.lora_names import check_new_lora, find_lora
from lmjax.protocol import EngineInfo
from lmjax.types import LoraInfo, ParameterError

if TYPE_CHECKING:
    from lmjax.engine.engine import Engine

Names = str | None | Sequence[str | None]


class LoraCalls:
    """Of ``LLM``. Every method may be called from any thread, also while another one generates."""

    info: EngineInfo
    _engine: Engine
    _between_steps: Callable[[Callable[[], Any]], Any]

    @property
    def loras(self) -> dict[str, LoraInfo]:
        """The adapters that requests may name."""
        infos: list[LoraInfo] = self._between_steps(self._engine.loras.infos)
        return {info.name: info for info in infos}

    def load_lora(self, name: str, path: str) -> None:
        """An adapter from a PEFT directory, under a name that is not taken; requests of other threads go on. Needs
        ``enable_lora``. Raises ``AdapterError``, with the file and the field or tensor at fault; then nothing has
        changed."""
        path = str(path)
        check_new_lora(name, path, self.loras, self.info)
        found = self._engine.executor.read_adapter(path)
        self._between_steps(lambda: self._engine.loras.add(name, path, found))

    def unload_lora(self, name: str) -> None:
        """New requests cannot name it; those that are there are answered with it. Raises ``AdapterError`` if there is
        no such adapter."""
        find_lora(name, self.loras, self.info)
        self._between_steps(lambda: self._engine.loras.remove(name))

    def _lora_names(self, lora: Names, count: int) -> list[str | None]:
        """One a request. Raises ``ParameterError`` for another number of them, ``AdapterError`` for an unknown one."""
        names = [lora] * count if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != count:
            raise ParameterError("lora", f"got {len(names)} of them for {count} prompts, must be one or as many")
        if any(name is not None for name in names):
            known = self.loras
            for name in names:
                find_lora(name, known, self.info)
        return names
