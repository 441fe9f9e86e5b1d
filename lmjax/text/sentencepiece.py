"""A tokenizer from a sentencepiece ``tokenizer.model``, read without the sentencepiece and protobuf packages.

The file is a protocol buffer; fields are those of sentencepiece's ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmjax.text import spm
from lmjax.text.errors import TokenizerError

_UNIGRAM, _BPE = 1, 2


@dataclass
class _Model:
    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model_type: int = _UNIGRAM
    space_as_suffix: bool = False
    special: dict[str, str] = field(
        default_factory=lambda: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    )
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_spaces: bool = True


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value: Any
            value, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = data[at : at + size], at + size
        elif wire == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"unknown wire type {wire}")
        if at > len(data):
            raise ValueError("a field goes past the end of the file")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number is cut off")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _parse(data: bytes) -> _Model:
    model = _Model()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            model.pieces.append(piece.get(1, b"").decode())
            model.scores.append(struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0])
            model.kinds.append(piece.get(3, spm.NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
            model.model_type = trainer.get(3, _UNIGRAM)
            model.space_as_suffix = bool(trainer.get(24, 0))
            for key, name in ((45, "unk_token"), (46, "bos_token"), (47, "eos_token")):
                if key in trainer:
                    model.special[name] = trainer[key].decode()
        elif number == 3:
            normalizer = dict(_fields(value))
            model.charsmap = normalizer.get(2, b"")
            model.add_dummy_prefix = bool(normalizer.get(3, 1))
            model.remove_extra_spaces = bool(normalizer.get(4, 1))
    if not model.pieces:
        raise ValueError("it holds no pieces")
    return model


def load_sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by name. Raises ``TokenizerError`` naming the file."""
    try:
        model = _parse(path.read_bytes())
    except (OSError, ValueError, struct.error, AttributeError, TypeError) as error:
        raise TokenizerError(f"{path} is not a sentencepiece model: {error}") from None
    if model.space_as_suffix:
        raise TokenizerError(f"{path} puts the space behind a word (treat_whitespace_as_suffix): not supported")
    if model.model_type == _BPE:
        tokenizer = spm.build(model.pieces, model.scores, model.kinds, add_space_prefix=model.add_dummy_prefix)
        tokenizer.normalizer = normalizers.Sequence([*_cleaning(model), tokenizer.normalizer])
    elif model.model_type == _UNIGRAM:
        tokenizer = _unigram(model)
    else:
        raise TokenizerError(f"{path} is a sentencepiece model of kind {model.model_type}: not supported")
    return tokenizer, {name: token for name, token in model.special.items() if token in set(model.pieces)}


def _cleaning(model: _Model) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _unigram(model: _Model) -> Tokenizer:
    unknown = model.kinds.index(spm.UNKNOWN) if spm.UNKNOWN in model.kinds else None
    fallback = spm.BYTE in model.kinds
    tokenizer = Tokenizer(models.Unigram(list(zip(model.pieces, model.scores, strict=True)), unknown, fallback))
    prefix = [normalizers.Prepend("▁")] if model.add_dummy_prefix else []
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([*_cleaning(model), *prefix, spaces])
    # Metaspace's own prefix is left out where a text begins with a space; sentencepiece's never is.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never")
    strip = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    spm.add_marked(tokenizer, model.pieces, model.kinds)
    return tokenizer
