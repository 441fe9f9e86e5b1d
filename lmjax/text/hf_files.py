"""A tokenizer from the files of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from lmjax.text.errors import TokenizerError
from lmjax.text.tokenizer import Tokenizer, TokenizerSettings

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGGED_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def load_hf_tokenizer(path: Path) -> Tokenizer:
    """``path``: the directory, or a tokenizer.json in it. Raises ``TokenizerError``."""
    directory, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    config = _config(directory)
    named = {key: text for key in _NAMED if (text := _content(config.get(key))) is not None}
    if file.is_file():
        backend = _read_backend(file)
        _add_tokens(backend, config, named)
        _set_bos_eos(backend, config, named)
    elif (model := _sentencepiece_file(directory)) is not None:
        from lmjax.text.sentencepiece import load_sentencepiece

        backend, own = load_sentencepiece(model)
        named = own | named
        _add_tokens(backend, config, named)
        defaults = {"add_bos_token": True, "add_eos_token": False}
        _set_bos_eos(backend, defaults | config | {"tokenizer_class": "LlamaTokenizer"}, named)
    else:
        raise TokenizerError(
            f"{directory} has no tokenizer: expected tokenizer.json or a sentencepiece tokenizer.model"
            " (tiktoken and tekken files alone are not supported; convert them to tokenizer.json)"
        )
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))  # True: special tokens in a text are text
    settings = TokenizerSettings(str(directory), named, _chat_template(directory, config))
    return Tokenizer(backend, settings)


def _read_backend(file: Path) -> Backend:
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerError(f"{file} is not a valid tokenizer.json: {error}") from None


def _sentencepiece_file(directory: Path) -> Path | None:
    names = ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"]
    return next((directory / name for name in names if (directory / name).is_file()), None)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return value


def _config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; of older directories special_tokens_map.json and added_tokens.json are merged in."""
    config = _json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json(directory / "special_tokens_map.json")
        legacy = _json(directory / "added_tokens.json")
        special = {_content(config.get(key)) for key in _NAMED}
        config["added_tokens_decoder"] = {
            index: {"content": text, "special": text in special, "normalized": text not in special}
            for text, index in legacy.items()
        }
    return config


def _content(token: Any) -> str | None:
    """Special tokens are strings, or objects that describe them."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_token(data: dict[str, Any], special: bool) -> AddedToken:
    flags = {key: bool(data[key]) for key in _FLAGS if key in data}
    return AddedToken(data["content"], **(flags | ({"special": True} if special else {})))


def _add_tokens(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that only the config knows are added in the order of their ids; the named ones are special."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    by_id = sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0]))
    for _, data in by_id:
        if data["content"] not in known:
            backend.add_tokens([_added_token(data, special=data["content"] in named.values())])
            known.add(data["content"])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    for token in [*named.values(), *extra]:
        if isinstance(token, dict):
            backend.add_special_tokens([_added_token(token, special=True)])
        elif token:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def _set_bos_eos(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """``add_bos_token`` and ``add_eos_token`` win over tokenizer.json's template for the classes that have them.

    transformers 5 ignores them where there is a tokenizer.json; transformers 4 and llama.cpp follow them, and models
    were made that rely on it (DeepSeek V3's file alone adds no BOS).
    """
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in _FLAGGED_CLASSES or ("add_bos_token" not in config and "add_eos_token" not in config):
        return
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    set_template(backend, bos, eos)


def set_template(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Put ``bos`` before and ``eos`` behind every text that is encoded with special tokens."""
    parts = [bos, "$A", eos]
    pairs = [(token, backend.token_to_id(token)) for token in dict.fromkeys([bos, eos]) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in parts if part is not None],
        pair=[part for part in [*parts, bos, "$B", eos] if part is not None],
        special_tokens=pairs,
    )


def _chat_template(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Template files win over the config; several templates have names."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    template: Any = templates or _json(directory / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict) and list(template) == ["default"]:
        template = template["default"]
    return template
