"""Fetches a model of the Hugging Face hub into its cache (or ``download_dir``)."""

from __future__ import annotations

import re
from pathlib import Path

from lmjax.weights.errors import WeightError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
# weights only as safetensors; config, tokenizer and chat template in any of their forms
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# sub-folders (but 1_Pooling, of sentence-transformers) hold other formats of the same weights, and consolidated.* is
# Mistral's second copy
IGNORED = ["[!1]*/*", "1[!_]*/*", "*/*/*", "consolidated*"]


def fetch_model(name: str, revision: str | None, download_dir: str | None, config_only: bool = False) -> Path:
    """The local snapshot of ``org/name``. Files already there are not fetched again, cut downloads go on.

    config_only: without weights and tokenizer.

    The token comes from the environment (``HF_TOKEN``) or ``hf auth login``; ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``
    work as for any user of the hub. Raises ``WeightError``, one line.
    """
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=["config.json", "generation_config.json"] if config_only else PATTERNS,
            ignore_patterns=IGNORED,
        )
    except Exception as error:  # errors of the HTTP client come through, and which client it is differs by version
        raise WeightError(repr(name), f"not a directory here, and {_cause(error, name, revision)}") from error
    return Path(path)


def _cause(error: Exception, name: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    if constants.HF_HUB_OFFLINE:
        return f"not in the hub's cache{at}; the hub is not asked (HF_HUB_OFFLINE is set)"
    if isinstance(error, errors.GatedRepoError):
        return "the hub wants its licence accepted on the model's page, and a token (HF_TOKEN) of that account"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model (a private one needs HF_TOKEN)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"not in the hub's cache{at}, and the hub ({constants.ENDPOINT}) cannot be reached"
    lines = str(error).strip().splitlines() or [""]
    return f"fetching it from the hub failed: {type(error).__name__}: {lines[0]}"
