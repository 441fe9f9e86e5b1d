"""What a model's files say of pooling: those of sentence-transformers, and what the settings put in their place.

Layout: https://sbert.net/docs/sentence_transformer/usage/custom_models.html (modules.json, 1_Pooling/config.json,
sentence_bert_config.json).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmjax.config import ConfigError, EngineConfig
from lmjax.weights.errors import WeightError
from lmjax.weights.source import ModelSource, read_json

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls": "cls",  # newer versions
    "pooling_mode_mean": "mean",
}
ENCODERS = ("bert", "roberta", "xlm-roberta")  # model types
MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How hidden states become an embedding. ``kind``: last, mean or cls. ``max_length``: tokens that a text may have,
    if the files say. ``lower``: texts are made lower case. ``dimensions``: shorter embeddings that the model was
    trained for (Matryoshka); empty: any; None: none. ``declared``: the files are those of sentence-transformers.
    """

    kind: str
    normalize: bool = True
    max_length: int | None = None
    lower: bool = False
    dimensions: tuple[int, ...] | None = None
    declared: bool = False


def is_encoder(source: ModelSource) -> bool:
    return source.config.get("model_type") in ENCODERS


def read_pooling(source: ModelSource, config: EngineConfig) -> Pooling:
    """Where nothing says it, an encoder pools its first token and a decoder its last. Raises ``WeightError`` and
    ``ConfigError``."""
    default = "cls" if is_encoder(source) else "last"
    found = Pooling(default)
    modules = source.path / "modules.json"
    if source.kind == "hf" and modules.is_file():
        found = _from_modules(source.path, modules, default)
    given = config.pooler_config
    if "pooling_type" in given:
        found = replace(found, kind=given["pooling_type"].lower())
    if "use_activation" in given:
        found = replace(found, normalize=given["use_activation"])
    if config.deterministic and found.kind == "mean":
        raise ConfigError(
            "--deterministic: the model pools by mean, whose rounding follows the chunks of a prompt; must be LAST or "
            "CLS (--pooler-config)"
        )
    return replace(found, dimensions=_dimensions(source))


def _from_modules(directory: Path, modules: Path, default: str) -> Pooling:
    value = read_json_list(modules)
    found = Pooling(default, normalize=False, declared=True)
    for entry in value:
        kind = str(entry.get("type", "")).rsplit(".", 1)[-1] if isinstance(entry, dict) else repr(entry)
        if kind not in MODULES:
            raise WeightError(modules, f"has a module of type {kind!r}; known: {', '.join(MODULES)}")
        if kind == "Pooling":
            own = (directory / str(entry.get("path") or "1_Pooling")).resolve()
            if not own.is_relative_to(directory.resolve()):
                raise WeightError(modules, f"path: got {entry['path']!r}, must be a folder of the model's")
            found = replace(found, kind=_mode(own / "config.json"))
        elif kind == "Normalize":
            found = replace(found, normalize=True)
    file = directory / "sentence_bert_config.json"
    if not file.is_file():
        return found
    settings = read_json(file)
    length, lower = settings.get("max_seq_length"), settings.get("do_lower_case", False)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise WeightError(file, f"max_seq_length: got {length!r}, must be an integer of at least 1")
    return replace(found, max_length=length, lower=bool(lower))


def _mode(file: Path) -> str:
    """The one mode that is on."""
    if not file.is_file():
        raise WeightError(file, "is missing, but modules.json names it")
    values = read_json(file)
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value]
    if values.get("pooling_mode") is not None:  # of newer versions
        modes = [f"pooling_mode_{values['pooling_mode']}"]
    if len(modes) != 1 or modes[0] not in MODES:
        raise WeightError(file, f"asks for {', '.join(modes) or 'no mode'}, must be one of {', '.join(MODES)}")
    return MODES[modes[0]]


def read_json_list(path: Path) -> list[Any]:
    import json

    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightError(path, f"is not JSON: {error}") from error
    if not isinstance(value, list):
        raise WeightError(path, f"holds a JSON {type(value).__name__}, must be a list")
    return value


def _dimensions(source: ModelSource) -> tuple[int, ...] | None:
    """As in vLLM: ``matryoshka_dimensions`` or ``is_matryoshka`` of config.json (or --hf-overrides)."""
    listed = source.config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed and all(type(n) is int and n > 0 for n in listed):
        return tuple(listed)
    if listed not in (None, []):
        raise WeightError(source.path / "config.json", f"matryoshka_dimensions: got {listed!r}, must be integers")
    return () if source.config.get("is_matryoshka") else None
