"""Generated tokens to text, as they come: what a client may see, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmjax.text.stop import StopAutomaton
from lmjax.text.tokenizer import TextStream, Tokenizer
from lmjax.types import SamplingParams

_CONTEXT = 8  # tokens; enough for the bytes of a character and a special token


@dataclass(slots=True)
class DetokResult:
    """``text``: new text to show. ``stop``: the stop string that ended it. ``consumed``: how many of the pushed
    tokens count, up to and including the one that completed the stop string."""

    text: str
    stop: str | None
    consumed: int


class Detokenizer:
    """Text of one choice. Everything pushed comes out: the texts and ``flush`` joined are ``Tokenizer.decode`` of
    all tokens (with ``after``: what they add to the prompt's), cut at the stop string.

    Text is held back while it may still become a stop string or a whole character. A stop string matches as soon as
    its last character is there, wherever the borders of tokens are; of several that end on the same character, the
    longest. It is searched in the text that is shown: a special token matches only with
    ``skip_special_tokens=False``. One that is completed by the first ``min_tokens`` tokens is plain text.

    The token that ended a request (eos, ``stop_token_ids``) is not pushed unless its text is to be shown.
    """

    __slots__ = ("_automaton", "_count", "_held", "_include", "_min_tokens", "_push", "_state", "_stopped", "_stream")

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        automaton: StopAutomaton | None = None,
        after: Sequence[int] = (),
    ):
        """``automaton``: that of ``params.stop``, to share it between the choices of a request.

        ``after``: the prompt's ids. The text then goes on from the prompt's: it keeps the space with which it begins
        (some vocabularies drop it at the start of a text), and completes a character that the prompt's end cuts.
        """
        self._stream = TextStream(tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
        for token_id in after[-_CONTEXT:]:
            self._stream.push(int(token_id))
        self._push = self._stream.push
        self._automaton = (automaton or StopAutomaton(params.stop)) if params.stop else None
        self._state = self._automaton.root if self._automaton else None
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._count = 0
        self._held = ""
        self._stopped = False

    def push(self, token_ids: list[int]) -> DetokResult:
        """Take the next tokens. After a stop string matched, nothing more is taken."""
        if self._stopped:
            return DetokResult("", None, 0)
        if self._automaton is None:
            if len(token_ids) == 1:
                return DetokResult(self._push(token_ids[0]), None, 1)
            return DetokResult("".join(map(self._push, token_ids)), None, len(token_ids))
        if len(token_ids) == 1:
            self._count += 1
            return DetokResult(*self._scan(self._push(token_ids[0]), self._count > self._min_tokens), 1)
        shown = []
        for consumed, token_id in enumerate(token_ids, 1):
            self._count += 1
            text, stop = self._scan(self._push(token_id), self._count > self._min_tokens)
            shown.append(text)
            if stop is not None:
                return DetokResult("".join(shown), stop, consumed)
        return DetokResult("".join(shown), None, len(token_ids))

    def _scan(self, new: str, active: bool) -> tuple[str, str | None]:
        """Text that may be shown after ``new``, and the stop string that it completed."""
        automaton, state = self._automaton, self._state
        assert automaton is not None and state is not None
        root = automaton.root
        if state is root and automaton.firsts.isdisjoint(new):
            return new, None
        for i, char in enumerate(new):
            if state is root and char not in automaton.firsts:
                continue
            state = automaton.step(state, char)
            if state.match is not None and active:
                self._stopped = True
                text = self._held + new[: i + 1]
                self._held = ""
                return text if self._include else text[: len(text) - len(state.match)], state.match
        self._state = state
        text = self._held + new
        border = len(text) - state.pending
        self._held = text[border:]
        return text[:border], None

    def flush(self) -> str:
        """All text still held, at the end of the request; empty after a stop string."""
        if self._stopped:
            return ""
        text = self._held + self._stream.flush()
        self._held = ""
        return text
