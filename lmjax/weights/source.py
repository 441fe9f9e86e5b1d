"""From what the user names as the model to files and configuration on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmjax.weights.errors import WeightError
from lmjax.weights.hub import HUB_NAME, fetch_model
from lmjax.weights.safetensors import check_not_lfs

EMBEDDED = "smollm2"
KNOWN = f"known: a directory with config.json, a .gguf file, a hub name (org/name), {EMBEDDED!r}"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine.

    ``path``: what the tokenizer loads from (a Hugging Face directory, or the .gguf file). ``weights``: the directory of
    .safetensors files (kind ``hf``) or the .gguf file (kind ``gguf``); the same as ``path``, but for the embedded
    model, whose directory in the cache has no weights: they are read from the installed package's .gguf file.
    ``config`` and ``generation_config`` are as the Hugging Face files of those names, for a .gguf file made from its
    metadata. Kind ``arrays``: the weights are in memory (``weights.given``) and both paths only a name for messages.
    """

    path: Path
    kind: Literal["hf", "gguf", "arrays"]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weights: Path
    read_from: Path | None = None  # the file of ``config`` where it is not config.json in ``path``
    overridden: frozenset[str] = frozenset()  # keys of ``config`` that the caller has set

    @property
    def config_file(self) -> Path:
        """For messages about ``config``."""
        if self.read_from is not None:
            return self.read_from
        return self.path / "config.json" if self.path.is_dir() else self.path


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    hf_overrides: dict[str, Any] | None = None,
    *,
    config_only: bool = False,
) -> ModelSource:
    """Find (or fetch) the model; raises ``WeightError``, one line that has the cause and what would work.

    ``hf_overrides`` replace top-level keys of the config, as in vLLM. An existing path wins over a hub name; the name
    ``smollm2`` is always the embedded model (``./smollm2`` is a directory of that name). No weights are read.
    config_only: no more is needed: a path of a config.json will do, and of a hub model nothing else is fetched.
    """
    source = _find(model, revision, download_dir, config_only)
    if not hf_overrides:
        return source
    return replace(source, config={**source.config, **hf_overrides}, overridden=frozenset(hf_overrides))


def _find(model: str, revision: str | None, download_dir: str | None, config_only: bool) -> ModelSource:
    if model == EMBEDDED:
        from lmjax.weights.embedded import embedded_source

        return embedded_source()
    path = Path(model).expanduser()
    if path.is_dir():
        return directory_source(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return gguf_source(path)
        if config_only and path.suffix == ".json":
            return ModelSource(path.parent, "hf", read_json(path), {}, path.parent, read_from=path)
        raise WeightError(repr(model), f"is a file, but not a .gguf file; {KNOWN}")
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(model):
        raise WeightError(repr(model), f"no such file or directory; {KNOWN}")
    return directory_source(fetch_model(model, revision, download_dir, config_only))


def directory_source(path: Path) -> ModelSource:
    """A Hugging Face model directory. generation_config.json may be missing, config.json may not."""
    if not (path / "config.json").is_file():
        gguf = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; to load {gguf[0]}, give its path as the model" if gguf else f"; {KNOWN}"
        raise WeightError(path, f"has no config.json{hint}")
    generation = path / "generation_config.json"
    return ModelSource(
        path=path,
        kind="hf",
        config=read_json(path / "config.json"),
        generation_config=read_json(generation) if generation.is_file() else {},
        weights=path,
    )


def gguf_source(path: Path) -> ModelSource:
    from lmjax.weights.gguf import read_gguf
    from lmjax.weights.gguf_config import config_from_gguf, generation_config_from_gguf

    file = read_gguf(path)
    return ModelSource(
        path=path,
        kind="gguf",
        config=config_from_gguf(file),
        generation_config=generation_config_from_gguf(file),
        weights=path,
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        check_not_lfs(path)
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightError(path, f"cannot be read: {error.strerror}") from error
    except WeightError:
        raise
    except (ValueError, RecursionError) as error:
        raise WeightError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightError(path, f"holds a JSON {type(value).__name__}, must be an object")
    return value
