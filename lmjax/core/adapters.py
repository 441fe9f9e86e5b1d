"""LoRA adapters by number, and the slots on the device that hold some of them.

A slot is pinned while a running request uses it; of the others the one that was left longest ago is given to the next
adapter that needs one. An adapter that is forgotten stays until its last request has ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from lmjax.core.request import Request


class Adapters:
    """``num_slots``: 0 where there are no adapters.

    Waiting requests whose adapter can have no slot are set aside (``WaitingQueue``), and others pass. Fairness: when
    ``patience`` requests with adapters have passed the first of them, the slot with the fewest users is closed to those
    that come after it, until it is free.
    """

    def __init__(self, num_slots: int, patience: int):
        self.num_slots, self.patience = num_slots, patience
        self.slots: dict[int, int] = {}  # adapter -> its slot
        self.loads: list[tuple[int, int]] = []  # (adapter, slot) of the step being planned
        self.changed = False  # somebody who was set aside may find a slot now
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()  # running requests of an adapter
        self._left: OrderedDict[int, None] = OrderedDict()  # adapters in slots that are not pinned, oldest first
        self._requests: Counter[int] = Counter()  # of an adapter, that have not ended
        self._forgotten: set[int] = set()
        self._dropped: list[int] = []
        self._first: Request | None = None  # of those set aside, the first in rank
        self._passed = 0  # requests with adapters that were admitted before it though they rank after it
        self._closed: int | None = None  # the adapter whose slot is to be its

    # requests of an adapter

    def note_request(self, adapter: int) -> None:
        self._requests[adapter] += 1

    def note_held(self, request: Request) -> None:
        """It waits for something else now."""
        self.changed = True
        if request is self._first:
            self._first, self._passed, self._closed = None, 0, None

    def note_end(self, request: Request) -> None:
        """It has ended (and has given back its slot, if it had one)."""
        self.note_held(request)
        adapter = request.adapter
        self._requests[adapter] -= 1
        if not self._requests[adapter]:
            del self._requests[adapter]
            if adapter in self._forgotten:
                self._drop(adapter)

    def forget(self, adapter: int) -> None:
        """No request of it will come any more."""
        self._forgotten.add(adapter)
        if adapter not in self._requests:
            self._drop(adapter)

    def take_dropped(self) -> list[int]:
        """Adapters that were forgotten and that no plan will name again."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _drop(self, adapter: int) -> None:
        self._forgotten.discard(adapter)
        slot = self.slots.pop(adapter, None)
        if slot is not None:
            del self._left[adapter]
            self._free.append(slot)
        self.loads = [load for load in self.loads if load[0] != adapter]
        self._dropped.append(adapter)

    # slots

    def ready(self, first_aside: dict[int, Request]) -> list[int]:
        """Whose requests, of those that were set aside, may find a slot now. first_aside: see ``WaitingQueue``."""
        self.changed = False
        closed = self._closed if self._first is None or self._first.adapter != self._closed else None
        found = [adapter for adapter in first_aside if adapter in self.slots and adapter != closed]
        others = sorted(
            (request.rank, adapter) for adapter, request in first_aside.items() if adapter not in self.slots
        )
        return found + [adapter for _, adapter in others[: len(self._free) + len(self._left)]]

    def admits(self, request: Request) -> bool:
        """Whether a waiting request can have its adapter in this step. If not, it is to be set aside."""
        adapter = request.adapter
        if self._passes(request) and (adapter in self.slots or self._free or self._left):
            return True
        if self._first is None or request.rank < self._first.rank:
            self._first, self._passed, self._closed = request, 0, None
        return False

    def _passes(self, request: Request) -> bool:
        """Whether it may go before the first that was set aside."""
        first = self._first
        if first is None or request.rank <= first.rank:
            return True
        if self._passed >= self.patience and self._closed is None and self._pins:
            self._closed = min(self._pins, key=lambda adapter: (self._pins[adapter], -adapter))
        # a slot that is free is for the first
        return request.adapter in self.slots and request.adapter != self._closed

    def take(self, request: Request) -> int:
        """The slot of an admitted request's adapter, pinned; it is loaded with this step if it was not there."""
        adapter, first = request.adapter, self._first
        if first is not None and request.rank > first.rank:
            self._passed += 1
        self.note_held(request)
        slot = self.slots.get(adapter)
        if slot is None:
            slot = self._free.pop() if self._free else self.slots.pop(self._left.popitem(last=False)[0])
            self.slots[adapter] = slot
            self.loads.append((adapter, slot))
            self.changed = True
        self._left.pop(adapter, None)
        self._pins[adapter] += 1
        return slot

    def give_back(self, adapter: int) -> None:
        """A request of it runs no more."""
        self._pins[adapter] -= 1
        if not self._pins[adapter]:
            del self._pins[adapter]
            self._left[adapter] = None
            self.changed = True

    def check_integrity(self, running: list[int], requests: list[int]) -> None:
        """running: the adapter of each running request that has one; requests: of every request."""
        assert sorted([*self._free, *self.slots.values()]) == list(range(self.num_slots)), "slots of adapters"
        assert self._pins == Counter(running), "pins of adapters"
        assert set(self._left) == set(self.slots) - set(self._pins), "adapters left"
        assert self._requests == Counter(requests), "requests of adapters"
