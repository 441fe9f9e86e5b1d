"""What a model's config says about sampling and the end of a reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from lmjax.types import ParameterError, SamplingParams
from lmjax.weights.errors import WeightError

# generation_config.json -> SamplingParams; the set that vLLM takes. do_sample is not looked at, as there.
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
INTEGERS = ("top_k", "max_new_tokens")


def sampling_defaults(generation_config: dict[str, Any], source: Path = Path()) -> dict[str, Any]:
    """``SamplingParams`` fields that the model's authors set; a request's own fields win over them.

    Raises ``WeightError`` for a value that no request could have. source: the model, for the message.
    """
    found: dict[str, Any] = {}
    for key, name in NAMES.items():
        value = generation_config.get(key)
        if value is None:
            continue
        if key in INTEGERS and isinstance(value, float) and value.is_integer():
            value = int(value)  # 50.0 stands in some files
        try:
            SamplingParams(**cast(Any, {name: value}))
        except ParameterError as error:
            message = str(error).replace(name, key, 1)  # the file's own name of it
            raise WeightError(_file(source, "generation_config.json"), message) from error
        found[name] = value
    return found


def eos_token_ids(config: dict[str, Any], generation_config: dict[str, Any], source: Path = Path()) -> tuple[int, ...]:
    """The ids that end a reply, each once; ``generation_config`` wins over ``config``, as in vLLM and transformers.

    Raises ``WeightError``. source: the model, for the message.
    """
    for settings, file in ((generation_config, "generation_config.json"), (config, "config.json")):
        value = settings.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise WeightError(_file(source, file), f"eos_token_id: got {value!r}, must be a token id or a list of them")
        return tuple(dict.fromkeys(ids))
    return ()


def _file(source: Path, name: str) -> Path:
    """Of a directory its file; a .gguf file, or the name of weights in memory, has all in one."""
    return source / name if source.is_dir() else source
