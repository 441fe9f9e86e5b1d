"""Continuous batching on the host: which tokens each step computes, and what its results mean.

The device may be one step behind: ``schedule`` for step k+1 is called before ``update`` of step k. Everything per
decoding request is a numpy operation over arrays indexed by slot; Python loops run over events only (arrivals, ends,
full blocks, prefill chunks).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lmjax.config import SchedulerConfig
from lmjax.core.block_hash import root_digest
from lmjax.core.output import Finished, StepOutput
from lmjax.core.plan import POOLED, ExecutorInfo, StepPlan, StepResult
from lmjax.core.policy import rank
from lmjax.core.prefill import PrefillPlanner, PrefillRow
from lmjax.core.renewal import change_weights, give_up_kv
from lmjax.core.request import ForkGroup, NewRequest, Request, State
from lmjax.core.results import read_result
from lmjax.core.state import EngineState
from lmjax.core.stats import SchedulerStats
from lmjax.types import SamplingParams

_U64 = 2**64 - 1
_MOST_ITERATIONS = 4096  # kept for a snapshot that nobody takes
_NO_TOKENS = np.zeros(0, np.int32)
_NO_HANDLES, _NO_ROWS = np.zeros(0, np.int64).data, np.zeros((0, 1), np.int32).data


def request_seed(config_seed: int, handle: int) -> int:
    """The seed of a request that gave none: a splitmix64 of the engine's seed and the handle of its choice 0. So it is
    the same after preemption, and for all choices (those differ by their sample index)."""
    x = (config_seed * 0x9E3779B97F4A7C15 + handle + 1) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 30) * 0x94D049BB133111EB & _U64
    return (x ^ x >> 31) >> 1


class Scheduler:
    """``add`` and ``abort`` at any time; then ``schedule`` -> run the plan -> ``update``.

    At most ``info.stages`` plans may be without their ``update`` when ``schedule`` is called. Updates come in order.
    With several stages a call is a tick of the pipeline: the executor is given the plan, or an empty one.
    """

    def __init__(self, config: SchedulerConfig, info: ExecutorInfo):
        self.config, self.info = config, info
        self.budget = min(config.max_num_batched_tokens, info.token_buckets[-1])
        self.state = EngineState(config, info)
        self.prefill = PrefillPlanner(self.state, self.budget)
        self._ones = np.ones(info.max_num_seqs, np.int32)  # never changed
        self._all = np.ones(info.max_num_seqs, bool)
        self._longest = self.state.kv.longest_chunked()
        self._next_sequence = 0
        self._next_step = 0
        self._tick = 0
        self._iteration_tokens: deque[int] = deque(maxlen=_MOST_ITERATIONS)

    # requests

    def add(self, new: NewRequest) -> None:
        """Queues a request, or ends it at once with reason ``error`` if it can never run or the queue is full."""
        message = self._why_never(new)
        full = None if message else self._why_full(new)
        if message or full:
            for handle in range(new.handle, new.handle + new.params.n):
                event = Finished(handle, "error", message=message or full, queue_full=message is None)
                self.state.finished.append(event)
            return
        choices = self._choices(new)
        for choice in choices:
            self.state.requests[choice.handle] = choice
            if new.adapter:
                self.state.adapters.note_request(new.adapter)
        if len(choices) > 1:
            group = ForkGroup(choices[0], choices[1:])
            for choice in choices:
                choice.group = group
                choice.state = State.HELD
            choices[0].state = State.WAITING
        self.state.queue.push(choices[0])

    def refuse(self, handle: int, message: str) -> None:
        """Ends a choice that was not added with reason ``error``."""
        self.state.finished.append(Finished(handle, "error", message=message))

    def _choices(self, new: NewRequest) -> list[Request]:
        params, length = new.params, len(new.prompt)
        seed = request_seed(self.config.seed, new.handle) if params.seed is None else params.seed
        most = self.info.max_model_len
        limit = most if params.max_tokens is None else min(length + params.max_tokens, most)
        if new.pooling:
            limit = length + 1  # as if a token were on its way when the prompt is planned; it never comes
        origin = (new.adapter or None, new.cache_salt)
        root = root_digest(*origin, self.state.weights)
        first = self._next_sequence
        self._next_sequence += params.n
        return [
            Request(
                handle=new.handle + i,
                index=i,
                prompt=new.prompt,
                params=params if i == 0 else _without_prompt_logprobs(params),
                stop_ids=new.stop_ids,
                bad_words_ids=new.bad_words_ids,
                rank=rank(self.config.scheduling_policy, new.priority, new.arrival, first + i),
                seed=seed,
                limit=limit,
                root=root,
                origin=origin,
                adapter=new.adapter,
                history=new.prompt,
                num_targets=_first_target(new) if i == 0 else -1,
                after=new.after,
                entropy=new.entropy,
                pooling=new.pooling,
            )
            for i in range(params.n)
        ]

    def _why_never(self, new: NewRequest) -> str | None:
        length, info = len(new.prompt), self.info
        if length == 0:
            return "the prompt is empty"
        if new.pooling and length > info.max_model_len:
            return f"the prompt has {length} tokens, the context {info.max_model_len}"
        if length >= info.max_model_len and not new.pooling:
            return f"the prompt has {length} tokens, the context {info.max_model_len}: no room for a reply"
        if np.maximum.reduce(new.prompt.view(np.uint32)) >= info.vocab_size:  # so negative ids are large
            wrong = next(i for i in new.prompt.tolist() if not 0 <= i < info.vocab_size)
            return f"token id {wrong} is outside the vocabulary of {info.vocab_size}"
        chunked = self.config.enable_chunked_prefill
        if not chunked and length > self.budget:
            return f"the prompt has {length} tokens, a step at most {self.budget}, and chunked prefill is off"
        if not (length <= self._longest if chunked else self.state.kv.ever_fits(length, length)):
            blocks = min(pool.num_usable for pool in self.state.kv.pools)
            return f"the prompt has {length} tokens, more than the KV cache of {blocks} blocks of {info.block_size}"
        return None

    def _why_full(self, new: NewRequest) -> str | None:
        queue, config, free = self.state.queue, self.config, self.state.table.num_free
        if len(queue) < free:
            return None  # the next step takes it in
        if config.max_num_queued_reqs is not None and len(queue) - free >= config.max_num_queued_reqs:
            return f"the queue is full: {config.max_num_queued_reqs} requests wait"
        most = config.max_num_queued_tokens
        # those that the free slots take next may be any: their share of the tokens is that of their number
        waiting = queue.num_tokens * (len(queue) - free) // max(len(queue), 1)
        if most is not None and waiting + len(new.prompt) > most:
            return f"the queue is full: {waiting} tokens wait, at most {most} may"
        return None

    def abort(self, handles: Iterable[int]) -> None:
        """Ends choices in any state. Unknown handles (ended already) are passed over."""
        for handle in handles:
            request = self.state.requests.get(handle)
            if request is not None:
                self.state.finish(request, "abort")

    def has_work(self) -> bool:
        """Whether some request has not ended, or some event was not taken."""
        state = self.state
        return bool(state.requests or state.started or state.finished)

    # planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no request can have a token in it."""
        began = time.perf_counter()
        if self.info.stages > 1:
            self._begin_tick()
        plan = self._schedule_once()
        while plan is None and self.state.vacated:
            # all that it found was somebody without room; what that freed can be given out now
            plan = self._schedule_once()
        self.state.stats.plan_seconds += time.perf_counter() - began
        return plan

    def _begin_tick(self) -> None:
        """Of a pipeline: the next group has its step."""
        state = self.state
        self._tick += 1
        state.turn = self._tick % self.info.stages
        state.table.begin_tick(self._tick)
        if state.decode_left:
            state.forget_left()
        state.balance()

    def _schedule_once(self) -> StepPlan | None:
        state = self.state
        if state.decode_left:
            state.forget_left()
        state.vacated = False
        slots = self._decode_slots()
        rows: list[PrefillRow] = []
        if state.prefill or len(state.queue):
            rows = self.prefill.plan(len(slots))
            if state.vacated:
                slots = slots[state.table.handles[slots] >= 0]
        patches = state.kv.take_patches()  # those of slots given back since are harmless: nobody reads there
        return self._plan(slots, rows, patches) if len(slots) or rows else None

    def _decode_slots(self) -> np.ndarray:
        """The slots that decode in this step, each with room for its token."""
        state, slots = self.state, self.state.decode
        if len(slots) > self.budget:  # they take turns
            slots, rest = slots[: self.budget], slots[self.budget :]
            state.decode = np.concatenate((rest, slots))
        table, kv = state.table, state.kv
        growing = slots[table.computed[slots] >= kv.capacity[slots]]
        if not len(growing):
            return slots
        if kv.window_groups:
            for slot in growing.tolist():
                kv.free_behind(slot, int(table.computed[slot]))
        while len(growing) > kv.num_free:
            if not state.make_room():
                request = table.requests[int(growing[0])]
                assert request is not None
                state.cut_short(request)
                return slots[:0]
            growing = growing[table.handles[growing] >= 0]
        if len(growing):
            kv.grow_each(growing)
        return slots[table.handles[slots] >= 0] if state.vacated else slots

    def _plan(self, decode: np.ndarray, rows: list[PrefillRow], patches: np.ndarray) -> StepPlan:
        state, table = self.state, self.state.table
        count, total = len(decode), len(decode) + len(rows)
        slots, starts = np.empty(total, np.intp), np.empty(total, np.int32)
        lengths, samples = self._ones[:total].copy(), self._all[:total].copy()
        slots[:count] = decode
        self._plan_decode(decode, starts[:count])
        token_ids, target_ids = _NO_TOKENS, None
        if rows:
            for i, row in enumerate(rows, count):
                slots[i], starts[i], lengths[i], samples[i] = row.request.slot, row.start, row.length, row.samples
            token_ids = np.concatenate([table.tokens[r.request.slot, r.start : r.start + r.length] for r in rows])
            target_ids = _target_ids(rows, len(token_ids))
            if self.prefill.new_decodes:
                state.decode = np.concatenate((state.decode, np.array(self.prefill.new_decodes, np.intp)))
        plan = StepPlan(
            step_id=self._next_step,
            num_decode=count,
            slots=slots,
            handles=table.handles[slots],
            keys=table.keys[slots],
            starts=starts,
            lengths=lengths,
            samples=samples,
            token_ids=token_ids,
            target_ids=target_ids,
            entropy=target_ids is not None and any(row.request.entropy for row in rows),
            patches=patches,
            slot_loads=state.slot_loads,
            copies=self.prefill.copies if rows else [],
        )
        if table.num_with_adapter:
            adapters = table.adapters[slots]
            plan.adapters = adapters if (adapters >= 0).any() else None
            plan.adapter_loads, state.adapters.loads = state.adapters.loads, []
        if state.tier is not None:
            plan.swaps_out, plan.swaps_in = state.tier.take()
        table.note_planned(slots)
        state.slot_loads = []
        state.release_ready_groups()
        self._next_step += 1
        state.stats.steps += 1
        state.stats.scheduled_tokens += plan.num_tokens
        self._iteration_tokens.append(plan.num_tokens)
        return plan

    def _plan_decode(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """Moves the slots on by the token of this step. ``starts``: int32 [n], to be filled with its positions."""
        state, table = self.state, self.state.table
        table.computed.take(slots, out=starts, mode="clip")
        planned = starts + 2
        table.planned[slots] = planned
        table.computed[slots] = starts + 1
        more = planned < table.limit[slots]
        if np.count_nonzero(more) < len(slots):
            # their last token is on its way: never plan past a length that is known beforehand
            if state.decode is not slots:
                more = table.planned[state.decode] < table.limit[state.decode]
            state.decode = state.decode[more]

    # results

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Reads a step's result: new tokens, log-probabilities, and the events since the last output."""
        began = time.perf_counter()
        tier = self.state.tier
        if tier is not None and (len(plan.token_ids) or plan.swaps_out):
            tier.costs.observe(plan, result.seconds)
        output = read_result(self.state, plan, result)
        self.state.stats.plan_seconds += time.perf_counter() - began
        return output

    def take_events(self) -> StepOutput | None:
        """Starts and ends that no ``update`` has given out yet, or None."""
        state = self.state
        if not state.started and not state.finished:
            return None
        output = StepOutput(_NO_HANDLES, 1, _NO_ROWS, [], state.started, state.finished)
        state.started, state.finished = [], []
        return output

    # weights and pool

    def new_weights(self, recompute: bool) -> None:
        """The plans from now on are computed with other weights. recompute: also what running requests have computed;
        else they keep their KV, and no request that begins later finds any of it."""
        change_weights(self.state, recompute)

    def give_up_kv(self) -> None:
        """The pool's content is lost (and the host tier's): what ran waits, and is computed again when it comes in."""
        give_up_kv(self.state)

    # adapters

    def forget_adapter(self, adapter: int) -> None:
        """No more requests of it will be added; those that are there go on."""
        self.state.adapters.forget(adapter)

    def take_dropped_adapters(self) -> list[int]:
        """Those that were forgotten and that no plan from now on names."""
        return self.state.adapters.take_dropped()

    @property
    def adapters_on_device(self) -> set[int]:
        return set(self.state.adapters.slots)

    # insight

    def stats(self) -> SchedulerStats:
        """A snapshot. ``iteration_tokens`` starts anew with each (of the last 4,096 steps at most)."""
        state = self.state
        tokens = list(self._iteration_tokens)
        self._iteration_tokens.clear()
        return replace(
            state.stats,
            num_running=state.num_running,
            num_waiting=len(state.requests) - state.num_running,
            kv_usage=state.kv.usage,
            host_usage=state.tier.usage if state.tier is not None else 0.0,
            iteration_tokens=tokens,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if free + cached + used blocks, references, tables or queues do not add up."""
        self.state.check_integrity()


def _without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    return params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)


def _first_target(new: NewRequest) -> int:
    if new.pooling:
        return len(new.prompt) - 1 if new.pooling == "last" else 0
    return -1 if new.params.prompt_logprobs is None else 0


def _target_ids(rows: list[PrefillRow], total: int) -> np.ndarray | None:
    """int32 [total]: the token after each prefill token of those rows that want prompt log-probabilities; POOLED for
    tokens to pool. Each is asked for once, whatever becomes of the request's slot meanwhile."""
    targets = None
    at = 0
    for row in rows:
        request = row.request
        if request.num_targets >= 0:
            first = max(row.start, request.num_targets)
            end = min(row.start + row.length, request.all_targets)
            if first < end:
                if targets is None:
                    targets = np.full(total, -1, np.int32)
                here = targets[at + first - row.start : at + end - row.start]
                if request.pooling:
                    here[:] = POOLED
                else:
                    known = request.prompt[first + 1 : end + 1]
                    here[: len(known)], here[len(known) :] = known, request.after
                request.num_targets = end
        at += row.length
    return targets
