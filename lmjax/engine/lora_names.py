"""What the front end checks of adapters before the engine hears of them, and which of them are in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lmjax.config import MAX_LORA_NAME
from lmjax.engine.output import RequestState
from lmjax.protocol import EngineInfo
from lmjax.types import AdapterError, LoraInfo


def check_enabled(info: EngineInfo) -> None:
    if not info.max_loras:
        raise AdapterError("lora: the engine was started without --enable-lora")


def find_lora(name: Any, loras: Mapping[str, LoraInfo], info: EngineInfo) -> None:
    """None is the model itself. Raises ``AdapterError`` where there is no such adapter."""
    if name is None:
        return
    check_enabled(info)
    if not isinstance(name, str) or name not in loras:
        raise AdapterError(f"lora: there is no adapter {name!r:.300}", unknown=True)


def check_new_lora(name: Any, path: Any, loras: Mapping[str, LoraInfo], info: EngineInfo) -> None:
    """Raises ``AdapterError`` for a name that is none or is taken, and for what is no path."""
    check_enabled(info)
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_LORA_NAME or not name.isprintable():
        said = f"got the name {name!r:.300}, must be 1 to {MAX_LORA_NAME} printable characters"
        raise AdapterError(f"lora: {said}", field="name")
    if name in loras:
        said = f"the name {name!r} is taken by the adapter in {loras[name].path}; unload that first"
        raise AdapterError(f"lora: {said}", field="name")
    if not isinstance(path, str) or not path:
        raise AdapterError(f"lora: got the path {path!r:.300}, must be that of a directory")


def merged_names(lists: Iterable[list[str]]) -> list[str]:
    return sorted({name for names in lists for name in names})


def in_use(requests: Iterable[tuple[str, RequestState]]) -> tuple[list[str], list[str]]:
    """Names of adapters that have requests which have begun, and of those with requests that wait, each once."""
    running: dict[str, None] = {}
    waiting: dict[str, None] = {}
    for name, request in requests:
        if not request.finished:
            (running if request.metrics.scheduled else waiting)[name] = None
    return sorted(running), sorted(waiting)
