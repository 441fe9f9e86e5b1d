"""Which prompt tokens a step computes: chunks of running requests, then requests that come in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from lmjax.core.request import Request, State
from lmjax.core.state import EngineState

# What one more step costs beside its tokens, in tokens: the weights are read once more (23 ms for SmolLM2 on two cores,
# where a prefill token takes 1.6 ms).
STEP_COST = 16


@dataclass(slots=True)
class PrefillRow:
    request: Request
    start: int
    length: int
    samples: bool = False


class PrefillPlanner:
    """Fills one step with prefill rows. A row is committed (its blocks named, its request moved on) when the next
    one is looked at; so the last can still be trimmed to the edge of a token bucket."""

    def __init__(self, state: EngineState, budget: int):
        self.state = state
        self.budget = budget
        config = state.config
        self.chunked = config.enable_chunked_prefill
        self.most = min(budget, config.long_prefill_token_threshold or budget)
        self.most_rows = self._most_rows = -(-state.info.max_num_seqs // state.info.stages)  # of a step
        self.rows: list[PrefillRow] = []
        self._open: PrefillRow | None = None  # the last one, while it is not committed
        self.copies: list[tuple[int, int, int]] = []
        self.new_decodes: list[int] = []
        self._blocked: tuple[int, int] | None = None  # (ticket, free blocks) of a head of the queue without room

    def plan(self, num_decode: int) -> list[PrefillRow]:
        """The step's prefill rows beside ``num_decode`` decode rows."""
        self.rows, self.copies, self.new_decodes = [], [], []
        self._most_rows = self.most_rows - num_decode
        left = self.budget - num_decode
        if self.state.prefill:
            left = self._continue_running(left)
        if len(self.state.queue):
            self._admit_waiting(left)
        if self._open is not None and self.chunked:
            self._trim(self._open, num_decode)
        self._commit()
        return self.rows

    def _continue_running(self, left: int) -> int:
        for request in list(self.state.prefill):
            if left <= 0 or len(self.rows) >= self._most_rows:
                break
            if request.slot >= 0:
                start = int(self.state.table.computed[request.slot])
                length = self._fit_chunk(request, start, left)
                if length:
                    self._add(request, start, length)
                    left -= length
        return left

    def _fit_chunk(self, request: Request, start: int, left: int) -> int:
        """Room for the next chunk of a running request, preempting others if there is none at all."""
        state, kv = self.state, self.state.kv
        slot, block_size = request.slot, self.state.info.block_size
        kv.free_behind(slot, start)
        while kv.capacity[slot] <= start and not kv.num_free:
            if not state.make_room():
                state.cut_short(request)
                return 0
            if request.slot < 0:
                return 0
        length = min(int(state.table.planned[slot]) - start, left, self.most)
        length = min(length, int(kv.capacity[slot]) + kv.num_free * block_size - start)
        kv.grow(slot, start + length)
        return length

    def _admit_waiting(self, left: int) -> None:
        state = self.state
        if state.adapters.changed:
            for adapter in state.adapters.ready(state.queue.first_aside()):
                state.queue.bring_back(adapter)
        # a slot that was given back in this step is not handed out again in it: its patches would collide, and
        # who was preempted may still have a token on its way
        while left > 0 and not state.vacated and state.table.num_free and len(self.rows) < self._most_rows:
            request = state.queue.peek()
            if request is None or request.pending:
                break
            way = self._way_in(request)
            if way == "hold":
                self._hold(request)
                continue
            if request.adapter and not state.adapters.admits(request):
                state.queue.set_aside()
                continue
            length = self._fork(request) if way == "fork" else self._enter(request, left)
            if not length:
                break
            left -= length

    def _way_in(self, request: Request) -> str:
        """How a waiting request gets in: ``enter`` with its prompt, ``fork`` from its leader, or ``hold`` for it."""
        group = request.group
        if group is None or group.leader is request or request.started:
            return "enter"
        leader, start = group.leader, request.num_prompt - 1
        if group in self.state.ready_groups:
            return "hold"  # a copy made in this step would come before what the leader writes in it
        if group.ready_epoch < 0:
            if leader.state in (State.WAITING, State.RUNNING):
                return "hold"
        elif (
            leader.state is State.RUNNING
            and leader.epoch == group.ready_epoch
            and self.state.kv.can_fork(leader.slot, start)
        ):
            return "fork"
        group.leader, group.ready_epoch = request, -1
        return "enter"

    def _hold(self, request: Request) -> None:
        assert request.group is not None
        self.state.queue.remove(request)
        self.state.adapters.note_held(request)
        request.state = State.HELD
        request.group.held.append(request)

    def _fork(self, request: Request) -> int:
        state, group = self.state, request.group
        assert group is not None
        if not state.kv.num_free:
            return 0
        leader, start = group.leader, request.num_prompt - 1
        request.digests = leader.digests[: request.num_prompt // state.info.block_size]
        slot = state.start(request, start)
        self.copies += state.kv.fork(leader.slot, slot, start)
        state.note_started(request, leader.num_cached, looked_up=False)
        self._add(request, start, 1)
        return 1

    def _enter(self, request: Request, left: int) -> int:
        state, kv, block_size = self.state, self.state.kv, self.state.info.block_size
        alone = state.num_running == 0
        if not alone and self._blocked == (request.ticket, kv.num_free):
            return 0
        self._commit()  # its blocks may be a prefix of this request
        hit = state.lookup(request)
        total, start = len(request.history), hit.num_tokens
        length = min(total - start, left, self.most)
        if not self.chunked and length < total - start <= self.budget:
            return 0
        if not alone and not kv.fits_now(total, hit, self.most):
            self._blocked = (request.ticket, kv.num_free)
            return 0
        slot = state.start(request, start)
        kv.open(slot, hit)
        length = min(length, int(kv.capacity[slot]) + kv.num_free * block_size - start)
        kv.grow(slot, start + length)
        if request.saved is not None:
            state.stats.swaps_in += bool(hit.places)
            state.forget_saved(request)
        state.note_started(request, start, state.caching, hit.num_places * block_size)
        self._add(request, start, length)
        return length

    def _add(self, request: Request, start: int, length: int) -> None:
        self._commit()
        self._open = PrefillRow(request, start, length)
        self.rows.append(self._open)

    def _trim(self, last: PrefillRow, num_decode: int) -> None:
        """Cuts the last chunk so that the step fills a smaller token bucket, if the padding costs more than what is
        postponed and its step."""
        buckets = self.state.info.token_buckets
        total = num_decode
        for row in self.rows:
            total += row.length
        above = bisect_left(buckets, total)
        below = bisect_right(buckets, total) - 1
        if below < 0 or above >= len(buckets):
            return
        over, padding = total - buckets[below], buckets[above] - total
        if padding > over + STEP_COST and last.length > over:
            last.length -= over

    def _commit(self) -> None:
        row, self._open = self._open, None
        if row is None:
            return
        state, table, request = self.state, self.state.table, row.request
        slot, end = request.slot, row.start + row.length
        table.computed[slot] = end
        known = int(table.known[slot])
        if end >= table.next_named[slot]:
            state.name_blocks(slot, end)
        if end < known:
            if request not in state.prefill:
                state.keep_prefilling(request)
        else:
            row.samples = not request.pooling
            table.planned[slot] = known + 1
            if request in state.prefill:
                state.prefill.remove(request)
            if known + 1 < request.limit:
                self.new_decodes.append(slot)
        group = request.group
        if group is not None and group.leader is request and group.ready_epoch < 0 and end >= request.num_prompt:
            group.ready_epoch = request.epoch
            state.ready_groups.append(group)
