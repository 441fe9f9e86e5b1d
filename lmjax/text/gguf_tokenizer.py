"""A tokenizer from the metadata of a GGUF file, with the behaviour of llama.cpp (checked on its golden files)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from lmjax.text import spm
from lmjax.text.errors import TokenizerError
from lmjax.text.gguf_metadata import read_metadata
from lmjax.text.hf_files import set_template
from lmjax.text.pretokenizers import ADDS_BOS, IGNORES_MERGES, patterns_of
from lmjax.text.tokenizer import Tokenizer as Wrapped
from lmjax.text.tokenizer import TokenizerSettings

_IDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "mask": "mask_token"}
_ENDS = ("eot", "eom")  # of a turn, of a message: generation ends there, too
_SPM_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def load_gguf_tokenizer(path: Path) -> Wrapped:
    """Raises ``TokenizerError`` for a kind of vocabulary or a pre-tokenizer that is not known."""
    data = read_metadata(path, lambda key: key.startswith(("tokenizer.", "general.")))
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in data.items()}
    pieces = ggml.get("tokens")
    if not pieces:
        raise TokenizerError(f"{path} has no tokenizer (tokenizer.ggml.tokens)")
    pieces = [piece or f"[EMPTY_{i}]" for i, piece in enumerate(pieces)]
    kinds = ggml.get("token_type") or [spm.NORMAL] * len(pieces)
    kind, pre = ggml.get("model"), ggml.get("pre", "default")
    ids = {name: ggml[f"{name}_token_id"] for name in (*_IDS, *_ENDS) if f"{name}_token_id" in ggml}
    if kind == "llama":
        prefix = ggml.get("add_space_prefix", True)
        backend = spm.build(pieces, ggml.get("scores") or [0.0] * len(pieces), kinds, add_space_prefix=prefix)
        ids = _SPM_IDS | ids
    elif kind == "gemma4":
        backend = _newline_bpe(pieces, kinds, _merges(path, ggml, pieces), ggml.get("add_space_prefix", False))
    elif kind == "gpt2":
        backend = _byte_level_bpe(pieces, kinds, _merges(path, ggml, pieces), pre)
    else:
        raise TokenizerError(f"{path}: tokenizer.ggml.model {kind!r} is not supported; known are gpt2, llama, gemma4")
    if "phi-3" in (name := str(data.get("general.name", "")).lower()) or "phi3" in name:
        backend = _strip_after_specials(backend)
    special = {_IDS[name]: pieces[i] for name, i in ids.items() if name in _IDS and 0 <= i < len(pieces)}
    add_bos = ggml.get("add_bos_token", kind == "llama" or (kind == "gpt2" and pre in ADDS_BOS))
    add_eos = ggml.get("add_eos_token", False)
    set_template(
        backend, *(special.get(f"{n}_token") if on else None for n, on in (("bos", add_bos), ("eos", add_eos)))
    )
    ends = tuple(ids[name] for name in _ENDS if name in ids)
    return Wrapped(backend, TokenizerSettings(str(path), special, _templates(data), ends))


def _merges(path: Path, ggml: dict[str, Any], pieces: list[str]) -> list[tuple[str, str]]:
    if "merges" not in ggml:
        raise TokenizerError(f"{path} has no tokenizer.ggml.merges")
    known = set(pieces)
    pairs = []
    for merge in ggml["merges"]:
        left, _, right = merge[1:].partition(" ")  # a merge's first character may be a space
        left = merge[:1] + left
        if left in known and right in known and left + right in known:
            pairs.append((left, right))
    return pairs


def _byte_level_bpe(pieces: list[str], kinds: list[int], merges: list[tuple[str, str]], pre: str) -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in IGNORES_MERGES))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns_of(pre)]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    tokenizer.decoder = decoders.ByteLevel()
    spm.add_marked(tokenizer, pieces, kinds)
    return tokenizer


def _newline_bpe(pieces: list[str], kinds: list[int], merges: list[tuple[str, str]], prefix: bool) -> Tokenizer:
    """Gemma 4: a sentencepiece vocabulary with merges; only newlines bound a merge."""
    tokenizer = spm.build(pieces, [], kinds, add_space_prefix=prefix, merges=merges)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    return tokenizer


def _strip_after_specials(backend: Tokenizer) -> Tokenizer:
    """Phi-3's special tokens swallow the white space behind them; GGUF has no field for that."""
    import json

    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return Tokenizer.from_str(json.dumps(data))


def _templates(data: dict[str, Any]) -> str | dict[str, str] | None:
    default = data.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}
    if named and default is not None:
        named["default"] = default
    return named or default
