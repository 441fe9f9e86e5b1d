"""Stop strings in a stream of text.

An Aho-Corasick automaton (Aho & Corasick 1975) whose states are made when the text first reaches them: a request may
carry 64 strings of 4096 characters, and the text visits few of their prefixes. Each character costs O(1), however
many strings there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class _State:
    """A prefix, ``depth`` characters long, of the sorted strings ``low`` .. ``high - 1``.

    ``fail``: the longest proper suffix that is a prefix, too. ``match``: the longest string that ends here.
    """

    __slots__ = ("depth", "fail", "high", "low", "match", "next", "pending")

    def __init__(self, low: int, high: int, depth: int):
        self.low, self.high, self.depth = low, high, depth
        self.fail: _State | None = None
        self.match: str | None = None
        self.next: dict[str, _State | None] = {}  # None: no string goes on with that character
        self.pending = depth


class StopAutomaton:
    """Shared by all choices of a request; a position in the text is a state, begun with ``root``."""

    def __init__(self, strings: Sequence[str]):
        self._strings = sorted(set(strings))
        self.root = _State(0, len(self._strings), 0)
        self.firsts = frozenset(string[0] for string in self._strings)

    def step(self, state: _State, char: str) -> _State:
        """The state after one more character of the text."""
        at: _State | None = state
        while at is not None:
            child = at.next[char] if char in at.next else self._child(at, char)
            if child is not None:
                return child
            at = at.fail
        return self.root

    def _child(self, state: _State, char: str) -> _State | None:
        strings, depth = self._strings, state.depth
        low = bisect_left(strings, char, state.low, state.high, key=lambda s: s[depth : depth + 1])
        high = bisect_right(strings, char, low, state.high, key=lambda s: s[depth : depth + 1])
        child = None
        if low < high:
            child = _State(low, high, depth + 1)
            child.fail = self.root if state.fail is None else self.step(state.fail, char)
            whole = len(strings[low]) == depth + 1
            child.match = strings[low] if whole else child.fail.match
            # A whole string that no other goes on from is nothing to wait for.
            if whole and high - low == 1:
                child.pending = child.fail.pending
        state.next[char] = child
        return child
