"""Texts and pairs of texts as an encoder or an embedding model takes them: cut on the right, special tokens kept."""

from __future__ import annotations

from typing import Any

from lmjax.text.objects import NoTokenizer
from lmjax.text.tokenizer import Tokenizer, clean_text


def encode_text(
    tokenizer: Tokenizer,
    text: str,
    second: str | None = None,
    *,
    keep: int | None = None,
    lower: bool = False,
    add_special_tokens: bool = True,
) -> tuple[list[int], int]:
    """Ids of a text, or of a pair, and where the second text begins (0: the model does not tell them apart).

    keep: most tokens, special ones included; of a pair the longer text is cut first, as ``longest_first`` of
    transformers does. lower: texts are made lower case. Raises ``ParameterError`` where there is no tokenizer.
    """
    if isinstance(tokenizer, NoTokenizer):
        tokenizer.encode(text)
    texts: list[Any] = [clean_text(t.lower() if lower else t) for t in (text, second) if t is not None]
    backend: Any = tokenizer.backend
    if keep is None:
        encoding = backend.encode(*texts, add_special_tokens=add_special_tokens)
        return encoding.ids, _split(encoding.type_ids)
    parts = [backend.encode(t, add_special_tokens=False) for t in texts]
    special = backend.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
    for part, most in zip(parts, _shares([len(p.ids) for p in parts], max(keep - special, 0)), strict=True):
        part.truncate(most)
    encoding = backend.post_process(*parts, add_special_tokens=add_special_tokens)
    return encoding.ids[:keep], _split(encoding.type_ids[:keep])


def _shares(lengths: list[int], room: int) -> list[int]:
    """How many tokens of each part stay."""
    if sum(lengths) <= room or len(lengths) == 1:
        return [min(n, room) for n in lengths]
    short = min(lengths)
    if short <= room // 2:
        return [short, room - short] if lengths[0] == short else [room - short, short]
    half, odd = divmod(room, 2)
    return [half, half + odd] if lengths[0] <= lengths[1] else [half + odd, half]


def _split(types: list[int]) -> int:
    return types.index(1) if 1 in types else 0
