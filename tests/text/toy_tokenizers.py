"""Small tokenizers of every decoder family, written as Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

TEXTS = ["Hello", "wor", "ld", "the", "a", "b", "c", "é", "世界", "\n", "  ", ".", "'s", "n't", "do", "not"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|tool|>"]


def _vocab(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral: ▁ for spaces, byte fallback, one space stripped at the start."""
    pieces = SPECIAL[:3] + [f"<0x{b:02X}>" for b in range(256)] + TEXTS + ["▁" + t for t in TEXTS] + ["▁", "▁▁"]
    tokenizer = Tokenizer(models.BPE(_vocab(pieces), [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = SPECIAL[:3] + TEXTS + ["▁" + t for t in TEXTS] + ["▁"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(pieces))], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = [*SPECIAL[:3], *TEXTS, *("##" + t for t in TEXTS), "?", "'m"]
    tokenizer = Tokenizer(models.WordPiece(_vocab(pieces), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level() -> Tokenizer:
    """All single bytes and some merged ones that cut characters in the middle."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [level.pre_tokenize_str(t)[0][0] for t in TEXTS]
    halves = [w[: len(w) // 2] for w in words if len(w) > 1] + [w[len(w) // 2 :] for w in words]
    tokenizer = Tokenizer(models.BPE(_vocab([*SPECIAL[:3], *alphabet, *words, *halves]), []))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(_vocab([*SPECIAL[:3], *TEXTS]), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


KINDS = {f.__name__: f for f in (byte_level, sentencepiece_like, metaspace, word_piece, no_decoder)}


def write(path: Path, kind: str, **config: Any) -> Path:
    """A directory with a tokenizer of a kind; ``config`` goes to tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<plain>", normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
