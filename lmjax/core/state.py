"""All requests of the engine, and the moves between waiting, running and finished."""

from __future__ import annotations

import time
from bisect import insort

import numpy as np

from lmjax.config import SchedulerConfig
from lmjax.core.adapters import Adapters
from lmjax.core.block_hash import block_digest, extend_digests
from lmjax.core.host_tier import HostTier, Saved, own_name
from lmjax.core.kv_manager import NO_HIT, KVManager, PrefixHit
from lmjax.core.output import Finished, Started
from lmjax.core.plan import ExecutorInfo, SlotLoad
from lmjax.core.policy import victim
from lmjax.core.queue import WaitingQueue
from lmjax.core.request import ForkGroup, Request, State
from lmjax.core.slots import SlotTable
from lmjax.core.stats import SchedulerStats
from lmjax.types import FinishReason

NEVER = 2**31 - 1


class EngineState:
    """Who is where. A running request is in exactly one of: ``prefill`` (some known token is not scheduled yet),
    ``decode`` (one token a step), or neither (its last token is on its way: planned = limit)."""

    def __init__(self, config: SchedulerConfig, info: ExecutorInfo):
        self.config, self.info = config, info
        self.caching = config.enable_prefix_caching
        self.table = SlotTable(info.max_num_seqs, info.max_model_len, info.block_size, info.stages)
        cols = -(-info.max_model_len // info.block_size)
        self.kv = KVManager(info.kv_specs, info.num_blocks, info.block_size, info.max_num_seqs, cols)
        self.queue = WaitingQueue()
        self.adapters = Adapters(info.max_loras, patience=info.max_num_seqs)
        self.requests: dict[int, Request] = {}
        self.weights = 0  # how often the weights were changed
        self.turn = 0  # which of the pipeline's groups of decode rows has its step now; a group has every p-th step
        self.groups = [np.zeros(0, np.intp) for _ in range(info.stages)]  # slots
        self.prefill: list[Request] = []  # by rank
        self.ready_groups: list[ForkGroup] = []  # their choices may fork from the next step on
        self.stats = SchedulerStats()
        self.tier: HostTier | None = None
        if info.host is not None:
            self.tier = self.kv.tier = HostTier(info.host, self.kv.pools, info.kv_specs, info.block_size, self.stats)
        self.started: list[Started] = []
        self.finished: list[Finished] = []
        self.slot_loads: list[SlotLoad] = []
        self.vacated = False  # a slot was given back since planning began
        self.decode_left = False  # ``decode`` may hold slots that were given back

    @property
    def num_running(self) -> int:
        return self.table.num_taken

    @property
    def decode(self) -> np.ndarray:
        """Slots that decode in the step being planned."""
        return self.groups[self.turn]

    @decode.setter
    def decode(self, slots: np.ndarray) -> None:
        self.groups[self.turn] = slots

    def forget_left(self) -> None:
        """Takes the slots that were given back out of the groups."""
        handles = self.table.handles
        self.groups = [slots[handles[slots] >= 0] for slots in self.groups]
        self.decode_left = False

    def balance(self) -> None:
        """Groups of equal size: what this one has too much goes with the next step."""
        most = -(-sum(map(len, self.groups)) // len(self.groups))
        mine, after = self.decode, (self.turn + 1) % len(self.groups)
        if len(mine) > most:
            self.decode, self.groups[after] = mine[:most], np.concatenate((mine[most:], self.groups[after]))

    # into a slot

    def start(self, request: Request, computed: int) -> int:
        """Takes a request from the queue into a slot; ``computed`` of its tokens need not be computed."""
        self.queue.remove(request)
        request.state = State.RUNNING
        slot = self.table.take(request, computed)
        if request.adapter:
            self.table.set_adapter(slot, self.adapters.take(request))
        if self.caching:
            named = computed // self.info.block_size
            self.table.next_named[slot] = (named + 1) * self.info.block_size
            self.table.parents[slot] = request.digests[named - 1] if named else request.root
        else:
            self.table.next_named[slot] = NEVER
        self.slot_loads.append(
            SlotLoad(
                slot,
                request.params,
                request.seed,
                request.index,
                request.history,
                request.num_prompt,
                request.stop_ids,
                request.bad_words_ids,
            )
        )
        return slot

    def note_started(self, request: Request, num_cached: int, looked_up: bool, num_host: int = 0) -> None:
        """Once for each request, when it gets its first slot."""
        if request.started:
            return
        request.started = True
        request.num_cached = num_cached
        self.started.append(Started(request.handle, num_cached, time.monotonic()))
        if looked_up:
            self.stats.prefix_queries += request.num_prompt
            self.stats.prefix_hits += num_cached
            if self.tier is not None:
                self.stats.host_queries += request.num_prompt - num_cached + num_host
                self.stats.host_hits += num_host
        group = request.group
        if group is None or not group.prompt_counted:
            self.stats.prompt_tokens += request.num_prompt
            if group is not None:
                group.prompt_counted = True

    def lookup(self, request: Request) -> PrefixHit:
        """The prefix hit of a waiting request: full blocks, and at least one token is left to compute.

        A preempted request whose KV was kept finds all of it, if nothing of it was lost.
        """
        if request.saved is not None:
            hit = self.kv.resume(request.saved.names, request.saved.num_tokens)
            if hit.num_blocks:
                return hit
            if not self.caching:
                return self.kv.lookup(request.saved.names[: request.saved.num_tokens // self.info.block_size])
        if not self.caching:
            return NO_HIT
        began = time.perf_counter()
        extend_digests(request.digests, request.root, request.history, self.info.block_size)
        most = (len(request.history) - 1) // self.info.block_size
        if 0 <= request.num_targets < request.all_targets:
            # prompt log-probabilities come from computing the prompt: skip only what was asked before
            most = min(most, request.num_targets // self.info.block_size)
        hit = self.kv.lookup(request.digests[:most])
        if hit.places and not self._worth_bringing(hit):
            hit = self.kv.lookup(request.digests[:most], both=False)
        self.stats.hash_seconds += time.perf_counter() - began
        return hit

    def name_blocks(self, slot: int, num_tokens: int) -> None:
        """Names the full blocks of the first ``num_tokens`` tokens: all of them known, and their KV scheduled."""
        request = self.table.requests[slot]
        assert request is not None
        block_size = self.info.block_size
        first = int(self.table.next_named[slot]) // block_size - 1
        end = num_tokens // block_size
        if len(request.digests) < end:
            extend_digests(request.digests, request.root, self.table.tokens[slot, :num_tokens], block_size)
        self.kv.register(slot, request.digests, first, end)
        self.table.parents[slot] = request.digests[end - 1]
        self.table.next_named[slot] = (end + 1) * block_size

    def name_newest_blocks(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """``name_blocks`` for many slots (int [n]) at once; mostly each has one new full block."""
        began = time.perf_counter()
        table, size, parents = self.table, self.info.block_size, self.table.parents
        ends = table.next_named[slots]
        if np.count_nonzero(num_tokens >= ends + size):
            for slot, length in zip(slots.tolist(), num_tokens.tolist(), strict=True):
                self.name_blocks(slot, length)
        else:
            cols = ends // size - 1
            indices = slots.tolist()
            names = []
            for slot, tokens in zip(indices, table.block_bytes(slots, cols), strict=True):
                parents[slot] = name = block_digest(parents[slot], tokens)
                names.append(name)
            self.kv.register_each(slots, cols, names)
            table.next_named[slots] = ends + size
        self.stats.hash_seconds += time.perf_counter() - began

    def keep_prefilling(self, request: Request) -> None:
        insort(self.prefill, request, key=lambda r: r.rank)

    # out of a slot

    def preempt(self, request: Request, save: bool = True) -> None:
        """Back to the waiting requests. Its KV is found again later, as far as it is still cached, in either tier; the
        rest is computed again. save: let the host tier keep it, if that is cheaper."""
        self.stats.preemptions += 1
        if save and self.tier is not None:
            self._save(request)
        self._suspend(request)
        request.state = State.WAITING
        self.queue.push(request)

    def _save(self, request: Request) -> None:
        """Lets a request that loses its slot find its KV again, if that is to be cheaper than computing it."""
        assert self.tier is not None
        slot, size = request.slot, self.info.block_size
        computed = int(self.table.computed[slot])
        mode, cols = self.config.preemption_mode, self.kv.cols(computed)
        if mode == "recompute" or not cols or (mode == "auto" and not self.tier.worth_saving(computed, cols)):
            return
        full = 0
        if self.caching:
            full = computed // size
            extend_digests(request.digests, request.root, self.table.tokens[slot, :computed], size)
            self.kv.register(slot, request.digests, 0, full)  # also what lost its name with another block of that name
        names = request.digests[:full]
        names += self.kv.name_own(slot, full, [own_name(request.handle, request.epoch, c) for c in range(full, cols)])
        request.saved = Saved(computed, names)
        self.tier.want(request.saved)

    def forget_saved(self, request: Request) -> None:
        """It is back or gone."""
        if request.saved is not None:
            assert self.tier is not None
            self.tier.drop(request.saved)
            request.saved = None

    def _worth_bringing(self, hit: PrefixHit) -> bool:
        """Whether what a hit has in the host tier is brought sooner than it is computed."""
        assert self.tier is not None
        start = next(col for ids in hit.places for col, place in enumerate(ids) if place) * self.info.block_size
        costs = self.tier.costs
        return costs.swap_in(hit.num_places) < costs.recompute(start, hit.num_tokens)

    def make_room(self) -> bool:
        """Frees blocks: of requests that only wait for their last token, else of the lowest in rank.

        False if there is nobody but the one request that asks.
        """
        table = self.table
        last_on_its_way = (table.planned == table.limit) & (table.handles >= 0)
        if last_on_its_way.any():
            for slot in last_on_its_way.nonzero()[0].tolist():
                request = table.requests[slot]
                assert request is not None
                self.park(request)
            return True
        if self.num_running <= 1:
            return False
        self.preempt(victim(request for request in table.requests if request is not None))
        return True

    def park(self, request: Request) -> None:
        """Its last token is on its way: it needs slot and blocks no more."""
        self._suspend(request)
        request.state = State.PARKED

    def cut_short(self, request: Request) -> None:
        """The only running request has no room to grow: it ends with what it has."""
        slot = request.slot
        self.decode_left = True
        request.limit = self.table.limit[slot] = int(self.table.planned[slot])
        if self.table.planned[slot] == self.table.known[slot]:
            self.finish(request, "length")

    def _suspend(self, request: Request) -> None:
        table, slot = self.table, request.slot
        known = int(table.known[slot])
        request.history = table.tokens[slot, :known].copy()
        request.pending = int(table.planned[slot]) - known
        request.epoch += 1
        self._vacate(request)

    def _vacate(self, request: Request) -> None:
        slot = request.slot
        if request in self.prefill:
            self.prefill.remove(request)
        self.kv.close(slot)
        self.table.give_back(slot)
        if request.adapter:
            self.adapters.give_back(request.adapter)
        self.vacated = True
        if self.table.planned[slot] < self.table.limit[slot]:
            self.decode_left = True  # else its last token was planned, and so it left already

    # ends

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | None = None) -> None:
        """Takes a request in any state out of everything."""
        if request.state is State.RUNNING:
            self._vacate(request)
        elif request.state is State.WAITING:
            self.queue.remove(request)
        self.forget_saved(request)
        group = request.group
        if group is not None:
            if request.state is State.HELD:
                group.held.remove(request)
            elif group.leader is request and group.ready_epoch < 0 and group.held:
                self._promote(group)
        request.state = State.FINISHED
        if request.adapter:
            self.adapters.note_end(request)
        del self.requests[request.handle]
        self.finished.append(Finished(request.handle, reason, stop_reason))

    def _promote(self, group: ForkGroup) -> None:
        """The leader is gone before its prompt was scheduled: the next choice prefills it."""
        group.leader = group.held.pop(0)
        self.release_held(group.leader)

    def release_held(self, request: Request) -> None:
        request.state = State.WAITING
        self.queue.push(request)

    def release_ready_groups(self) -> None:
        """Lets the choices into the queue whose leader's prompt is scheduled by now."""
        for group in self.ready_groups:
            held, group.held = group.held, []
            for request in held:
                self.release_held(request)
        self.ready_groups.clear()

    def read_late_token(self, request: Request, token_id: int) -> int:
        """A token that was on its way when its request lost the slot. Returns the request's length."""
        request.history = np.append(request.history, np.int32(token_id))
        request.pending -= 1
        if request.state is State.WAITING:
            self.queue.num_tokens += 1
        return len(request.history)

    def check_integrity(self) -> None:
        """Blocks, tables, slots, queue and the sets of running requests fit together. Raises AssertionError."""
        self.table.check_integrity()
        self.kv.check_integrity()
        self.queue.check_integrity()
        with_adapter = [r.adapter for r in self.table.requests if r is not None and r.adapter]
        self.adapters.check_integrity(with_adapter, [r.adapter for r in self.requests.values() if r.adapter])
        table = self.table
        held = [r for r in self.requests.values() if r.state is State.HELD]
        groups = {id(r.group): r.group for r in self.requests.values() if r.group is not None}
        assert sorted(r.handle for r in held) == sorted(r.handle for g in groups.values() for r in g.held), "held"
        running = {r.slot for r in self.requests.values() if r.state is State.RUNNING}
        assert running == {s for s, r in enumerate(table.requests) if r is not None}, "running requests"
        listed = np.concatenate(self.groups).tolist()
        decode = [s for s in listed if table.handles[s] >= 0]
        assert self.decode_left or len(decode) == len(listed), "a free slot decodes"
        prefill = [r.slot for r in self.prefill]
        ending = [s for s in running if table.planned[s] == table.limit[s] and s not in prefill]
        decode = [s for s in decode if s not in ending]
        assert sorted(decode + prefill + ending) == sorted(running), "a running request is in no set, or in two"
        assert len(self.queue) == sum(r.state is State.WAITING for r in self.requests.values()), "waiting requests"
