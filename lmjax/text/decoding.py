"""How a vocabulary's token strings become bytes, token by token.

A decoder of the ``tokenizers`` library works on the whole list of tokens. Streaming needs the same result one token
at a time at constant cost, so the decoder's description is turned into a rule that depends on the token and on
whether it is the first; what cannot be put so is refused by name.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmjax.text.errors import TokenizerError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
EACH_BYTE = "lmjax-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# Byte fallback gives one replacement character per byte that is not text; byte-level one per broken sequence.
codecs.register_error(EACH_BYTE, _replace_each_byte)


def byte_alphabet() -> list[str]:
    """GPT-2's printable character of each byte (as in ``bytes_to_unicode`` of its release)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


_ALPHABET = {char: byte for byte, char in enumerate(byte_alphabet())}


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level token; one with a character outside the alphabet stands for itself."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


@dataclass(frozen=True)
class Decoding:
    """``rest`` maps a token string to its bytes, ``first`` that of the first token of a text.

    ``strip``: a character and how many of it go from the start of the text. ``errors``: the handler for bytes that
    are not UTF-8.
    """

    rest: Callable[[str], bytes]
    first: Callable[[str], bytes]
    errors: str = "replace"
    strip: tuple[str, int] = (" ", 0)


def decoding_from(decoder: dict[str, Any] | None) -> Decoding:
    """The rule for a decoder as tokenizer.json describes it. Raises ``TokenizerError`` for an unknown kind."""
    if decoder is None:  # the library joins tokens by spaces then
        return Decoding(rest=lambda piece: (" " + piece).encode(), first=str.encode)
    if decoder["type"] == "ByteLevel":
        return Decoding(rest=byte_level_bytes, first=byte_level_bytes)
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if len(parts) == 1 and parts[0]["type"] == "ByteLevel":
        return decoding_from(parts[0])
    return _chain(parts)


def _chain(parts: list[dict[str, Any]]) -> Decoding:
    rest: list[Callable[[str], str]] = []
    first: list[Callable[[str], str]] = []
    fallback = fused = False
    strip = (" ", 0)
    for part in parts:
        kind = part["type"]
        if kind == "ByteFallback":
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused:
            if part["stop"]:
                raise TokenizerError("the tokenizer's decoder strips the end of the text (Strip with stop > 0)")
            strip = (part["content"], part["start"])
        else:
            step, step_first = _step(part)
            rest.append(step)
            first.append(step_first)
    errors = EACH_BYTE if fallback else "replace"
    return Decoding(_compose(rest, fallback), _compose(first, fallback), errors, strip)


def _compose(steps: list[Callable[[str], str]], fallback: bool) -> Callable[[str], bytes]:
    def convert(piece: str) -> bytes:
        if fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for step in steps:
            piece = step(piece)
        return piece.encode("utf-8", "replace")

    return convert


def _step(part: dict[str, Any]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """One per-token step, for later tokens and for the first."""
    kind = part["type"]
    if kind == "Replace" and "String" in part["pattern"]:
        old, new = part["pattern"]["String"], part["content"]
        return (lambda piece: piece.replace(old, new),) * 2
    if kind == "Strip":
        return (lambda piece: _strip(piece, part["content"], part["start"], part["stop"]),) * 2
    if kind == "Metaspace":
        mark = part["replacement"]
        drop = part.get("prepend_scheme", "always") != "never"
        return (lambda piece: piece.replace(mark, " ")), (lambda piece: piece.replace(mark, "" if drop else " "))
    if kind == "WordPiece":
        return _word_piece(part["prefix"], part["cleanup"])
    raise TokenizerError(
        f"the tokenizer's decoder has a part of kind {kind} that is not supported; known are ByteLevel, ByteFallback, "
        "Fuse, Metaspace, Replace (of a string), Strip and WordPiece"
    )


def _strip(piece: str, char: str, start: int, stop: int) -> str:
    while start and piece.startswith(char):
        piece, start = piece[1:], start - 1
    while stop and piece.endswith(char):
        piece, stop = piece[:-1], stop - 1
    return piece


_CLEANUP = [(f" {mark}", mark) for mark in (".", "?", "!", ",")] + [
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
]


def _word_piece(prefix: str, cleanup: bool) -> tuple[Callable[[str], str], Callable[[str], str]]:
    def clean(piece: str) -> str:
        for old, new in _CLEANUP if cleanup else ():
            piece = piece.replace(old, new)
        return piece

    def rest(piece: str) -> str:
        return clean(piece.removeprefix(prefix) if piece.startswith(prefix) else " " + piece)

    return rest, clean
