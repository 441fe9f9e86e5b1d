"""The ``adapter_config.json`` of a PEFT directory: what an adapter is, or why it cannot be served.

Fields: https://huggingface.co/docs/peft/package_reference/lora (LoraConfig). A field that would change what is
computed, and is not built, is refused; so is one that is not known and set.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lmjax.types import AdapterError

CONFIG = "adapter_config.json"
# what says something of the training, or nothing about the result
_INFORMATION = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"),
    *("fan_in_fan_out", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
    *("eva_config", "lora_ga_config"),
}
# ways to begin that leave the base model's weights as they are; after others its weights are not the base model's
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "false")
_WHY = {
    "use_dora": "DoRA is not built",
    "modules_to_save": "whole modules beside the low-rank pairs are not built",
    "trainable_token_indices": "changed rows of the embedding are not built",
    "target_parameters": "experts of MoE layers are not built",
    "layer_replication": "a model with its layers repeated is another model",
    "alora_invocation_tokens": "activated LoRA is not built",
}


ALL_LINEAR = "all-linear"
Modules = tuple[str, ...] | str  # ends of names, or a pattern


@dataclass(frozen=True)
class LoraConfig:
    """``modules``, ``excluded``: ends of the names of what it changes and does not, as the file has them, or a pattern
    of whole names. ``layers``: those that it changes alone, by the number after ``layers_pattern`` in a name."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    modules: Modules
    excluded: Modules = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    ranks: dict[str, int] = field(default_factory=dict)  # pattern of a module's name -> its own
    alphas: dict[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return int(_of(self.ranks, module, self.rank))

    def leaves_out(self, module: str) -> str | None:
        """The field by which PEFT would not change a module, of which the file has tensors; None: it would."""
        if self.excluded and _names(self.excluded, module):
            return "exclude_modules"
        if self.modules != ALL_LINEAR and not _names(self.modules, module):
            return "target_modules"
        by_pattern = isinstance(self.modules, str) and self.modules != ALL_LINEAR
        if self.layers is None or by_pattern or module in self.modules:
            return None
        patterns = [rf"(?:.*?\.)?{name}" for name in self.layers_pattern] or [r".*?\.[^.]*"]
        found = (re.match(rf"{pattern}\.(\d+)\.", module) for pattern in patterns)
        number = next((int(match[1]) for match in found if match), None)
        return None if number in self.layers else "layers_to_transform"

    def scale_of(self, module: str) -> float:
        """What ``B A x`` is multiplied by."""
        rank, alpha = self.rank_of(module), _of(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _of(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """As in PEFT: a pattern is a regular expression for the whole name, or for what follows a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _names(modules: Modules, module: str) -> bool:
    """As PEFT's ``check_target_module_exists``."""
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in modules)


def read_config(directory: Path) -> LoraConfig:
    """Raises ``AdapterError``, one line with the file, the field, its value and what is allowed."""
    path = directory / CONFIG
    values = _read(path)

    def wrong(name: str, allowed: str, got: str | None = None) -> AdapterError:
        """got: what to show, if not the value."""
        shown = f"{values.get(name)!r:.200}" if got is None else got
        return AdapterError(f"{path}: {name}: got {shown}, {allowed}")

    if values.get("peft_type") != "LORA":
        raise wrong("peft_type", "must be LORA")
    if values.get("bias", "none") != "none":
        raise wrong("bias", "must be none: biases beside the low-rank pairs are not built")
    if _one_of(values.get("init_lora_weights"), _STARTS) is False:
        raise wrong(
            "init_lora_weights",
            "which has changed the base model's weights: save the adapter converted (PEFT's "
            "path_initial_model_for_weight_conversion)",
        )
    for name, value in values.items():
        if name not in _INFORMATION and value not in (None, False, "", [], {}):
            raise wrong(name, f"must be absent: {_WHY.get(name, 'this is not built')}")
    if not isinstance(values.get("use_rslora", False), bool):
        raise wrong("use_rslora", "must be true or false")
    return LoraConfig(
        path,
        _rank(values.get("r", 8), lambda: wrong("r", "must be an integer of at least 1")),
        _alpha(values.get("lora_alpha", 8), lambda: wrong("lora_alpha", "must be a number")),
        values.get("use_rslora", False),
        _modules(values, "target_modules", wrong),
        _modules(values, "exclude_modules", wrong) if values.get("exclude_modules") else (),
        _layers(values, wrong),
        _layers_pattern(values, wrong),
        _patterns(values, "rank_pattern", _rank, "integers of at least 1", wrong),
        _patterns(values, "alpha_pattern", _alpha, "numbers", wrong),
    )


def _one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    value = value.lower() if isinstance(value, str) else value
    return any(value is one or (isinstance(value, str) and value == one) for one in allowed)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file() and path.exists():
        raise AdapterError(f"{path}: is no regular file")  # reading a pipe would wait for ever
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise AdapterError(f"{path}: must be a JSON object")
    return values


def _rank(value: Any, wrong: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong()
    return value


def _alpha(value: Any, wrong: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise wrong()
    return float(value)


def _patterns(values: dict[str, Any], name: str, check: Any, of: str, wrong: Any) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise wrong(name, f"must be an object with patterns of names and {of}")
    for pattern, value in found.items():
        check(value, partial(wrong, name, f"must have {of}", f"{pattern!r}: {value!r:.200}"))
        _compiled(pattern, name, wrong)
    return found


def _modules(values: dict[str, Any], name: str, wrong: Any) -> Modules:
    value = values.get(name)
    if isinstance(value, str) and value:
        if value != ALL_LINEAR:
            _compiled(value, name, wrong)
        return value
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise wrong(name, "must be a list of names of modules, at least one, or a pattern")
    return tuple(value)


def _layers(values: dict[str, Any], wrong: Any) -> tuple[int, ...] | None:
    value = values.get("layers_to_transform")
    if value is None or value == []:
        return None
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in listed):
        raise wrong("layers_to_transform", "must be the number of a layer, or a list of them")
    return tuple(listed)


def _layers_pattern(values: dict[str, Any], wrong: Any) -> tuple[str, ...]:
    value = values.get("layers_pattern") or []
    listed = value if isinstance(value, list) else [value]
    for one in listed:
        if not isinstance(one, str):
            raise wrong("layers_pattern", "must be a name, or a list of names")
        _compiled(one, "layers_pattern", wrong)
    return tuple(listed)


def _compiled(pattern: str, name: str, wrong: Any) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise wrong(name, f"which is no regular expression ({error})", repr(pattern)) from None
