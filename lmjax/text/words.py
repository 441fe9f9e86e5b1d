"""``bad_words`` as token ids."""

from __future__ import annotations

from lmjax.text.tokenizer import Tokenizer
from lmjax.types import MAX_BAD_WORD_TOKENS, ParameterError


def bad_words_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """The token sequences to keep out: of each word as it begins a text and, as in vLLM, as it follows a space.

    The second is left out where it is the same, or is longer than the first (then the space is a token of its own,
    and the word behind it is the first sequence). Raises ``ParameterError`` for a word of no tokens or of too many.
    """
    result: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        plain = tokenizer.encode(bare, add_special_tokens=False)
        if not plain:
            raise ParameterError("bad_words", f"{word!r} has no tokens")
        spaced = tokenizer.encode(" " + bare, add_special_tokens=False)
        found = [plain] if len(spaced) != len(plain) or spaced[0] == plain[0] else [plain, spaced]
        longest = max(map(len, found))
        if longest > MAX_BAD_WORD_TOKENS:
            raise ParameterError("bad_words", f"{word!r} has {longest} tokens, at most {MAX_BAD_WORD_TOKENS} allowed")
        result += [ids for ids in found if ids not in result]
    return result
