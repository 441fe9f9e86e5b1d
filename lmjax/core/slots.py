"""What changes with every token of the running requests, as arrays indexed by slot."""

from __future__ import annotations

from collections import Counter

import numpy as np

from lmjax.core.plan import row_key
from lmjax.core.request import Request

MAX_STOP_IDS = 8  # more go through a set on the request (``many_stops``)


class SlotTable:
    """Rows of the running requests; S slots.

    Three lengths of a slot, in tokens: ``known`` (the host has read them), ``planned`` (drawn by the steps planned so
    far, so planned - known are on their way) and ``computed`` (those whose KV is in the pool after the steps planned
    so far). A decode row is computed = planned - 1.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, stages: int = 1):
        self.num_slots = num_slots
        self._stages = stages
        self._tick = 0
        self.last_ticks = np.zeros(num_slots, np.int64)  # in which a slot was planned; kept only for a pipeline
        self._resting: list[tuple[int, int]] = []  # (tick from which it may be taken, slot)
        self.requests: list[Request | None] = [None] * num_slots
        cols = -(-max_model_len // block_size)
        self.tokens = np.zeros((num_slots, cols * block_size), np.int32)
        self._flat_tokens = self.tokens.reshape(-1)
        self._width = cols * block_size
        self._blocks = self.tokens.view(np.dtype((np.void, 4 * block_size)))  # [S, cols], each item a block's bytes
        self.handles = np.full(num_slots, -1, np.int64)
        self.keys = np.full(num_slots, -1, np.int64)  # row_key of the request in the slot
        self.known = np.zeros(num_slots, np.int32)
        self.planned = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.next_named = np.zeros(num_slots, np.intp)  # tokens at which the next full block gets its name
        self.parents: list[bytes] = [b""] * num_slots  # digest of the last named block
        self.stop_ids = np.full((MAX_STOP_IDS, num_slots), -1, np.int32)
        self.adapters = np.full(num_slots, -1, np.int32)  # the adapter's slot, -1 for none
        self.num_with_adapter = 0
        self.many_stops = np.zeros(num_slots, bool)
        self.most_logprobs = -1  # that a request asked for; -1: none at all
        self._num_with_logprobs: Counter[int] = Counter({-1: num_slots})  # slots by what they ask for
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_many_stops = 0
        self._num_with_stops = [0] * (MAX_STOP_IDS + 1)  # slots by their number of stop ids
        self.stop_width = 0  # rows of ``stop_ids`` that are in use

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self.num_slots - len(self._free) - len(self._resting)

    def begin_tick(self, tick: int) -> None:
        """Slots given back may be taken again when no stage of the pipeline holds a step of theirs any more: sampling
        reads a slot's parameters and tokens at the end."""
        self._tick = tick
        if self._resting:
            self._free += [slot for ready, slot in self._resting if ready <= tick]
            self._resting = [entry for entry in self._resting if entry[0] > tick]

    def note_planned(self, slots: np.ndarray) -> None:
        if self._stages > 1:
            self.last_ticks[slots] = self._tick

    @property
    def any_many_stops(self) -> bool:
        return self._num_many_stops > 0

    def take(self, request: Request, computed: int) -> int:
        """Gives the request a slot and fills its row."""
        slot = self._free.pop()
        history, params, stops = request.history, request.params, request.stop_ids
        request.slot = slot
        self.requests[slot] = request
        self.tokens[slot, : len(history)] = history
        self.handles[slot] = request.handle
        self.keys[slot] = row_key(request.handle, request.epoch)
        self.known[slot] = self.planned[slot] = len(history)
        self.computed[slot] = computed
        self.limit[slot] = request.limit
        if params.logprobs is not None:
            self._num_with_logprobs[params.logprobs] += 1
            self.most_logprobs = max(self.most_logprobs, params.logprobs)
        if len(stops) <= MAX_STOP_IDS:
            self._num_with_stops[len(stops)] += 1
            self.stop_width = max(self.stop_width, len(stops))
            for i, stop in enumerate(stops):
                self.stop_ids[i, slot] = stop
        else:
            self.many_stops[slot] = True
            self._num_many_stops += 1
        return slot

    def give_back(self, slot: int) -> None:
        request = self.requests[slot]
        assert request is not None
        request.slot = -1
        self.requests[slot] = None
        self.handles[slot] = self.keys[slot] = -1
        count = len(request.stop_ids)
        if count <= MAX_STOP_IDS:
            self._num_with_stops[count] -= 1
            while self.stop_width and not self._num_with_stops[self.stop_width]:
                self.stop_width -= 1
            self.stop_ids[:count, slot] = -1
        else:
            self.many_stops[slot] = False
            self._num_many_stops -= 1
        if self.adapters[slot] >= 0:
            self.adapters[slot] = -1
            self.num_with_adapter -= 1
        if (k := request.params.logprobs) is not None:
            self._num_with_logprobs[k] -= 1
            if not self._num_with_logprobs[k]:
                del self._num_with_logprobs[k]
                self.most_logprobs = max(self._num_with_logprobs)
        if self._stages > 1:
            self._resting.append((int(self.last_ticks[slot]) + self._stages, slot))
        else:
            self._free.append(slot)

    def set_adapter(self, slot: int, adapter_slot: int) -> None:
        self.adapters[slot] = adapter_slot
        self.num_with_adapter += 1

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """One more known token for each of ``slots`` (intp [n]). Returns int32 [n], tokens known now."""
        lengths = self.known[slots]
        self._flat_tokens[slots * self._width + lengths] = token_ids
        lengths += 1
        self.known[slots] = lengths
        return lengths

    def block_bytes(self, slots: np.ndarray, cols: np.ndarray) -> list[bytes]:
        """The token ids of one block of each of ``slots``, that of column ``cols`` (intp [n] both)."""
        return self._blocks[slots, cols].tolist()

    def check_integrity(self) -> None:
        used = [slot for slot, request in enumerate(self.requests) if request is not None]
        resting = [slot for _, slot in self._resting]
        assert sorted(used + self._free + resting) == list(range(self.num_slots)), "slots"
        widest = max((len(r.stop_ids) for r in self.requests if r and len(r.stop_ids) <= MAX_STOP_IDS), default=0)
        assert self.stop_width == widest, "rows of stop ids"
        asked = [r.params.logprobs for r in self.requests if r and r.params.logprobs is not None]
        assert self.most_logprobs == max(asked, default=-1), "log-probabilities asked for"
        assert self.num_with_adapter == np.count_nonzero(self.adapters >= 0), "slots with an adapter"
        for slot in used:
            request = self.requests[slot]
            assert request is not None
            assert request.slot == slot and request.handle == self.handles[slot], "owner of a slot"
            assert (self.adapters[slot] >= 0) == bool(request.adapter), "adapter of a slot"
            assert self.keys[slot] == row_key(request.handle, request.epoch), "key of a slot"
            assert self.computed[slot] <= self.planned[slot] and self.known[slot] <= self.planned[slot], "lengths"
            assert self.planned[slot] <= self.limit[slot], "a slot was planned past its limit"
