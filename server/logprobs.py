"""Log-probabilities in the shapes of completions and chat."""

from __future__ import annotations

import codecs
from typing import Any

from lmjax.types import TokenLogprobs
from server.openai.replies import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs

FLOOR = -9999.0  # JSON has no -inf; the same number as in vLLM


def token_label(tokenizer: Any, token_id: int) -> str:
    """A token's text; where its bytes are no whole characters ``bytes:\\xc3`` as OpenAI writes them.

    An id that the tokenizer does not know has no text: ``token_id:500``.
    """
    data = tokenizer.token_bytes(token_id)
    if not data and token_id >= tokenizer.vocab_size:
        return f"token_id:{token_id}"
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def clamp(logprob: float) -> float:
    return max(logprob, FLOOR)


class CompletionLogprobsWriter:
    """One choice's ``logprobs`` objects, piece after piece; ``text_offset`` goes on from piece to piece.

    ``hide_special``: special tokens are no part of the text, so they take no room in the offsets.
    """

    def __init__(self, tokenizer: Any, k: int, hide_special: bool):
        self._tokenizer, self._k = tokenizer, k
        self._hidden = tokenizer.special_ids if hide_special else frozenset()
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, ids: list[int], entries: list[TokenLogprobs | None], text: str) -> CompletionLogprobs:
        """The echoed prompt's; ``text`` is what was echoed."""
        special = self._tokenizer.special_ids
        piece = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(ids, entries, strict=True):
            # a BOS that the tokenizer put in front is not in the text, one that the user wrote is
            shown = token_id not in special or text.startswith(self._text(token_id), self._offset)
            self._append(piece, token_id, entry, shown)
        self._offset = len(text)
        self._decoder.reset()
        return piece

    def push(self, entries: list[TokenLogprobs]) -> CompletionLogprobs:
        piece = CompletionLogprobs([], [], [], [])
        for entry in entries:
            self._append(piece, entry.token_id, entry, entry.token_id not in self._hidden)
        return piece

    def _append(self, piece: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None, shown: bool) -> None:
        label = token_label(self._tokenizer, token_id)
        piece.tokens.append(label)
        piece.text_offset.append(self._offset)
        if entry is None:
            piece.token_logprobs.append(None)
            piece.top_logprobs.append(None)
        else:
            piece.token_logprobs.append(clamp(entry.logprob))
            piece.top_logprobs.append(self._top(label, entry))
        if shown:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def _top(self, label: str, entry: TokenLogprobs) -> dict[str, float]:
        """The k most likely tokens and, as OpenAI documents, always the chosen one."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids[: self._k], entry.top_logprobs[: self._k], strict=True):
            top.setdefault(token_label(self._tokenizer, token_id), clamp(logprob))
        top.setdefault(label, clamp(entry.logprob))
        return top

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)


def chat_logprobs(tokenizer: Any, entries: list[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([_chat_entry(tokenizer, entry) for entry in entries])


def _chat_entry(tokenizer: Any, entry: TokenLogprobs) -> ChatTokenLogprob:
    token, logprob, data = _chat_token(tokenizer, entry.token_id, entry.logprob)
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return ChatTokenLogprob(token, logprob, data, [ChatTopLogprob(*_chat_token(tokenizer, i, p)) for i, p in pairs])


def _chat_token(tokenizer: Any, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    """Chat gives the bytes apart, so the text may have replacement characters."""
    return tokenizer.token_text(token_id), clamp(logprob), list(tokenizer.token_bytes(token_id))


def prompt_logprobs(tokenizer: Any, entries: list[TokenLogprobs | None], k: int) -> list[Any]:
    """vLLM's shape: null, then ``{"id": {logprob, rank, decoded_token}}`` a prompt token."""
    return [None if entry is None else _vllm_entry(tokenizer, entry, k) for entry in entries]


def _vllm_entry(tokenizer: Any, entry: TokenLogprobs, k: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids[:k], entry.top_logprobs[:k], strict=True), 1)
        if token_id != entry.token_id
    ]
    return {
        str(token_id): {"logprob": clamp(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, logprob, rank in ranked
    }
