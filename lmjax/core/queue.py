"""The waiting requests: a heap with lazy deletion, so that every operation is O(log n) whatever waits."""

from __future__ import annotations

import heapq

from lmjax.core.request import Request


class WaitingQueue:
    """``peek`` gives the request of the lowest rank. Counts requests and the tokens that they have to compute."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], int, Request]] = []
        self._aside: dict[int, list[tuple[tuple[int, float, int], int, Request]]] = {}  # heaps, by adapter
        self._next_ticket = 0
        self._count = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        request.ticket = self._next_ticket
        self._next_ticket += 1
        heapq.heappush(self._heap, (request.rank, request.ticket, request))
        self._count += 1
        self.num_tokens += len(request.history)

    def peek(self) -> Request | None:
        heap = self._heap
        while heap:
            _, ticket, request = heap[0]
            if request.ticket == ticket:
                return request
            heapq.heappop(heap)
        return None

    def set_aside(self) -> None:
        """``peek`` passes over the request that it gives, which waits on."""
        entry = heapq.heappop(self._heap)
        heapq.heappush(self._aside.setdefault(entry[2].adapter, []), entry)

    def first_aside(self) -> dict[int, Request]:
        """By adapter, the request of the lowest rank of those that were set aside."""
        first = {}
        for adapter, heap in list(self._aside.items()):
            while heap and heap[0][2].ticket != heap[0][1]:
                heapq.heappop(heap)
            if heap:
                first[adapter] = heap[0][2]
            else:
                del self._aside[adapter]
        return first

    def bring_back(self, adapter: int) -> None:
        """Those of an adapter that were set aside are given by ``peek`` again."""
        for entry in self._aside.pop(adapter):
            heapq.heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        """Takes a waiting request out; its heap entry goes when it comes up, or when such entries are the majority."""
        request.ticket = -1
        self._count -= 1
        self.num_tokens -= len(request.history)
        if len(self._heap) > 64 and len(self._heap) > 2 * self._count:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        live = [entry[2] for entry in sum(self._aside.values(), self._heap) if entry[2].ticket == entry[1]]
        assert len(live) == self._count, "number of waiting requests"
        assert sum(len(r.history) for r in live) == self.num_tokens, "number of waiting tokens"
