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


@dataclass(frozen=True)
class LoraConfig:
    """``modules``: ends of the names of what it changes, as the file has them; None: it has a pattern of names."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    modules: tuple[str, ...] | None
    ranks: dict[str, int] = field(default_factory=dict)  # pattern of a module's name -> its own
    alphas: dict[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return int(_of(self.ranks, module, self.rank))

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
        _modules(values.get("target_modules"), wrong),
        _patterns(values, "rank_pattern", _rank, "integers of at least 1", wrong),
        _patterns(values, "alpha_pattern", _alpha, "numbers", wrong),
    )


def _one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    value = value.lower() if isinstance(value, str) else value
    return any(value is one or (isinstance(value, str) and value == one) for one in allowed)


def _read(path: Path) -> dict[str, Any]:
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
        try:
            re.compile(pattern)
        except re.error as error:
            raise wrong(name, f"which is no regular expression ({error})", repr(pattern)) from None
    return found


def _modules(value: Any, wrong: Any) -> tuple[str, ...] | None:
    if isinstance(value, str) and value:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise wrong("target_modules", "must be a list of names of modules, at least one, or a pattern")
    return tuple(value)
