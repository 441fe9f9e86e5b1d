"""A tokenizer as the files of a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lmjax.text.tokenizer import Tokenizer

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.json"),
    "chat_template.jinja",
)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """The files that the tokenizer was read from; of one from elsewhere new ones. None if it has no tokens."""
    if not tokenizer.vocab_size:
        return
    source = Path(tokenizer.settings.source)
    found = [source / name for name in _FILES if (source / name).is_file()]
    if found and source.resolve() != directory.resolve():
        for path in found:
            shutil.copyfile(path, directory / path.name)
        named = source / "additional_chat_templates"
        if named.is_dir():
            shutil.copytree(named, directory / named.name, dirs_exist_ok=True)
    elif not found:
        _write(tokenizer, directory)


def _write(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.settings.special_tokens}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        config["chat_template"] = [{"name": name, "template": text} for name, text in template.items()]
    elif template is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
