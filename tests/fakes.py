"""A device without a model: its next token is a hash of the history that it reads through the block tables."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from lmjax.config import SchedulerConfig
from lmjax.core.output import StepOutput
from lmjax.core.plan import (
    ExecutorInfo,
    HostTierInfo,
    PromptLogprobs,
    SlotLoad,
    StepPlan,
    StepResult,
    TokenColumns,
    empty_plan,
    pack_rows,
    row_width,
    unpack_rows,
)
from lmjax.core.request import NewRequest
from lmjax.core.scheduler import Scheduler
from lmjax.types import KVSpec, SamplingParams
from tests.fake_adapters import MARK, FakeAdapters
from tests.fake_hash import draw, hash_of
from tests.fake_live import FakeLive
from tests.fake_pooling import pooled_rows


def full_spec(layers: tuple[int, ...] = (0,)) -> KVSpec:
    return KVSpec("full", layers, 1, 4, 4)


def window_spec(window: int, layers: tuple[int, ...] = (1,)) -> KVSpec:
    return KVSpec("window", layers, 1, 4, 4, window=window)


def fake_info(
    *,
    specs: tuple[KVSpec, ...] = (full_spec(),),
    num_blocks: int | tuple[int, ...] = 1024,
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_model_len: int = 512,
    vocab_size: int = 1000,
    max_logprobs: int = 5,
    token_buckets: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512),
    stages: int = 1,
    host: HostTierInfo | int | None = None,
) -> ExecutorInfo:
    """``num_blocks``: with the null block; one number for all groups. ``host``: the same, of the host tier."""
    if isinstance(num_blocks, int):
        num_blocks = (num_blocks,) * len(specs)
    if isinstance(host, int):
        host = host_info((host,) * len(specs))
    return ExecutorInfo(
        specs,
        num_blocks,
        block_size,
        max_num_seqs,
        max_model_len,
        vocab_size,
        max_logprobs,
        token_buckets,
        stages,
        host,
    )


def host_info(num_blocks: tuple[int, ...], transfer: float = 1e-6) -> HostTierInfo:
    """``transfer``: seconds of one, there or back; a token takes 1 ms."""
    return HostTierInfo(num_blocks, 4, transfer, transfer, 0.01, 1e-3, 1e-6)


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    copy: list[np.ndarray]  # the plan's arrays as they were at submit
    result: StepResult
    ready: float


def _arrays(plan: StepPlan) -> list[np.ndarray]:
    arrays = [plan.slots, plan.handles, plan.keys, plan.starts, plan.lengths, plan.samples, plan.token_ids]
    return [*arrays, plan.patches, *([] if plan.target_ids is None else [plan.target_ids])]


@dataclass
class FakeExecutor(FakeLive, FakeAdapters):
    """Implements ``lmjax.core.plan.Executor`` on numpy.

    Per KV group, block and offset it keeps which token at which position was written, and by which weights
    (``weights``: how often they were changed). Each row reads its context through its table and compares it with its
    slot's token table: a wrong table, a block freed too early, a wrong copy or a bad shared prefix is noted in
    ``errors``, spoils the KV that the row writes, and changes the token. The token depends on what was read, and on
    (seed, sample index, position) where temperature > 0.

    ``cheap``: no pool and no hash, for measuring the host alone. ``step_seconds``: what a step takes on the "device";
    ``collect`` sleeps until then. Steps run one after the other.
    """

    info: ExecutorInfo
    cheap: bool = False
    step_seconds: float = 0.0
    logprobs: bool = True
    errors: list[str] = field(default_factory=list)
    steps: int = 0
    weights: int = 0
    level: int = 0  # of sleep
    # told of each row: its handle, the group, whether it samples, and the weights that its context was computed by
    on_read: Callable[[int, int, bool, np.ndarray], None] | None = None

    def __post_init__(self) -> None:
        info = self.info
        groups, slots = len(info.kv_specs), info.max_num_seqs
        self.tokens = np.full((slots, info.max_model_len), -1, np.int32)
        self.tables = np.zeros((groups, slots, -(-info.max_model_len // info.block_size)), np.int32)
        self.loads: list[SlotLoad | None] = [None] * slots
        self.ready = 0.0
        self.in_flight = self.adapter_loads = 0
        self.adapter_slots: dict[int, int] = {}
        if not self.cheap:
            self.pools = [np.full((n, info.block_size, 3), -1, np.int64) for n in info.num_blocks]
            there = info.host.num_blocks if info.host else ()
            self.host_pools = [np.full((n, info.block_size, 3), -1, np.int64) for n in there]

    # the protocol

    def submit(self, plan: StepPlan) -> _InFlight:
        assert self.in_flight < 2, "more than two steps in flight"
        assert not self.level, "a step while it sleeps"
        self.in_flight += 1
        self.steps += 1
        result = self._run_cheap(plan) if self.cheap else self._run(plan)
        self.ready = max(time.perf_counter(), self.ready) + self.step_seconds
        return _InFlight(plan, [] if self.cheap else [a.copy() for a in _arrays(plan)], result, self.ready)

    def collect(self, in_flight: _InFlight) -> StepResult:
        self.in_flight -= 1
        if self.step_seconds:
            time.sleep(max(0.0, in_flight.ready - time.perf_counter()))
        if not self.cheap:
            for before, now in zip(in_flight.copy, _arrays(in_flight.plan), strict=True):
                assert np.array_equal(before, now), "a plan changed while its step ran"
        return in_flight.result

    def stats(self) -> dict[str, float]:
        return {"compiles_total": 0.0, "padded_tokens_total": 0.0, "device_seconds": self.steps * self.step_seconds}

    def close(self) -> None:
        pass

    # the device

    def _load(self, plan: StepPlan) -> None:
        for load in plan.slot_loads:
            self.loads[load.slot] = load
            self.tokens[load.slot] = -1
            self.tokens[load.slot, : len(load.history)] = load.history

    def _patch(self, plan: StepPlan) -> None:
        if len(plan.patches):
            group, slot, column, block = plan.patches.T
            places = set(zip(group.tolist(), slot.tolist(), column.tolist(), strict=True))
            assert len(places) == len(plan.patches), "a table entry is patched twice in one step"
            self.tables[group, slot, column] = block

    def _run_cheap(self, plan: StepPlan) -> StepResult:
        for load in plan.slot_loads:
            self.loads[load.slot] = load
        rows = plan.num_rows
        token_ids = ((plan.starts * 7 + plan.slots * 13) % (self.info.vocab_size - 8) + 8).astype(np.int32)
        if not self.logprobs:
            return StepResult(token_ids[:, None])
        result = np.zeros((rows, row_width(self.info.max_logprobs)), np.int32)
        result[:, 0], result[:, 2] = token_ids, 1
        return StepResult(result)

    def _run(self, plan: StepPlan) -> StepResult:
        self._load(plan)
        self._check_plan(plan)
        return self._sample(plan, self._forward(plan, self._inputs(plan)))

    def _forward(self, plan: StepPlan, inputs: list[np.ndarray]) -> list[int]:
        """Of one stage: swaps, tables, copies, KV. Returns a hash of what each row saw."""
        self.load_adapters(plan)
        self._swap(plan)
        self._patch(plan)
        for group, source, target in plan.copies:
            assert source and target, "copy with the null block"
            self.pools[group][target] = self.pools[group][source]
        for row, ids in enumerate(inputs):  # all rows of a layer write before any of them reads
            self._write(int(plan.slots[row]), int(plan.starts[row]), ids, self.weights_of(plan, row))
        return [self._read(plan, row) for row in range(plan.num_rows)]

    def _swap(self, plan: StepPlan) -> None:
        for group, block, place in plan.swaps_out:
            assert block and place, "swap with the null block"
            self.host_pools[group][place] = self.pools[group][block]
        for group, place, block in plan.swaps_in:
            assert block and place, "swap with the null block"
            self.pools[group][block] = self.host_pools[group][place]

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.info.token_buckets[-1], "more tokens than the largest bucket"
        assert len(set(plan.slots.tolist())) == plan.num_rows, "a slot has two rows in one step"
        assert (plan.lengths[: plan.num_decode] == 1).all() and plan.samples[: plan.num_decode].all()
        assert int(plan.lengths[plan.num_decode :].sum()) == len(plan.token_ids)
        ends = plan.starts + plan.lengths
        last = self.info.max_model_len - plan.samples
        assert (ends <= last).all(), "a token past the table"

    def _inputs(self, plan: StepPlan) -> list[np.ndarray]:
        rows = [self.tokens[s, p : p + 1] for s, p in zip(plan.slots, plan.starts, strict=True)][: plan.num_decode]
        at = 0
        for row in range(plan.num_decode, plan.num_rows):
            n = int(plan.lengths[row])
            rows.append(plan.token_ids[at : at + n])
            at += n
        return rows

    def _places(self, group: int, slot: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(first, end)
        return self.tables[group, slot, positions // self.info.block_size], positions % self.info.block_size

    def _write(self, slot: int, start: int, ids: np.ndarray, weights: int) -> None:
        for group, pool in enumerate(self.pools):
            blocks, offsets = self._places(group, slot, start, start + len(ids))
            if not blocks.all():
                self.errors.append(f"slot {slot} writes position {start} to the null block of group {group}")
            pool[blocks, offsets, 0] = ids
            pool[blocks, offsets, 1] = np.arange(start, start + len(ids))
            pool[blocks, offsets, 2] = weights

    def _read(self, plan: StepPlan, row: int) -> int:
        """Hash of what the row's last token sees; checks what all of its tokens see."""
        slot, start, end = int(plan.slots[row]), int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
        state = 0
        for group, (pool, spec) in enumerate(zip(self.pools, self.info.kv_specs, strict=True)):
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            blocks, offsets = self._places(group, slot, first, end)
            seen = pool[blocks, offsets]
            wanted = np.stack((self.tokens[slot, first:end], np.arange(first, end)), 1)
            if row >= plan.num_decode:
                wanted[start - first :, 0] = seen[start - first :, 0]
            if self.on_read is not None:
                self.on_read(int(plan.handles[row]), group, bool(plan.samples[row]), seen[:, 2].copy())
            mixed = (seen[:, 2] // MARK != self.weights_of(plan, row) // MARK).any()
            if not np.array_equal(seen[:, :2], wanted) or not blocks.all() or mixed:
                self.errors.append(f"step {plan.step_id} slot {slot} group {group}: wrong KV in {first}..{end - 1}")
                blocks, offsets = self._places(group, slot, start, end)
                pool[blocks, offsets, 1] = -7  # the KV that it writes is wrong, too
            last = 0 if spec.window is None else max(0, end - spec.window) - first
            state ^= draw(hash_of(seen[last:, 0] + 1, seen[last:, 1] + 8, seen[last:, 2]), group)
        return state

    def _sample(self, plan: StepPlan, hashes: list[int]) -> StepResult:
        rows, k = plan.num_rows, self.info.max_logprobs
        token_ids = np.full(rows, -1, np.int32)
        wants = False
        for row in np.flatnonzero(plan.samples).tolist():
            slot, position = int(plan.slots[row]), int(plan.starts[row] + plan.lengths[row])
            load = self.loads[slot]
            assert load is not None
            token_ids[row] = self._next_token(load, hashes[row], position)
            self.tokens[slot, position] = token_ids[row]
            wants |= load.params.logprobs is not None
        result = StepResult(token_ids[:, None])
        if wants:
            low = np.array([h % 1000 for h in hashes])
            top_ids = (token_ids[:, None] + np.arange(k)) % self.info.vocab_size
            top_logprobs = -(low[:, None] + np.arange(k)) / 100
            result = StepResult(pack_rows(TokenColumns(token_ids, -low / 100, low % 7 + 1, top_ids, top_logprobs)))
        if plan.target_ids is not None:
            result.prompt_logprobs = self._prompt_logprobs(plan)
        return result

    def _next_token(self, load: SlotLoad, state: int, position: int) -> int:
        params = load.params
        if params.temperature > 0:
            state = draw(state, load.seed, load.sample_index, position)
        token = state % self.info.vocab_size
        if position - load.num_prompt_tokens < params.min_tokens:
            while token in load.stop_ids:
                token = (token + 1) % self.info.vocab_size
        return token

    def _prompt_logprobs(self, plan: StepPlan) -> list[PromptLogprobs]:
        found, at, k = [], 0, self.info.max_logprobs
        assert plan.target_ids is not None
        for row in range(plan.num_decode, plan.num_rows):
            n, start = int(plan.lengths[row]), int(plan.starts[row])
            targets = plan.target_ids[at : at + n]
            wanted = np.flatnonzero(targets >= 0)
            found += pooled_rows(plan, row, targets, plan.token_ids[at : at + n], self.weights)
            at += n
            if len(wanted):
                ids, positions = targets[wanted], start + wanted + 1
                assert (np.diff(positions) == 1).all(), "targets with a gap"
                values = np.array([hash_of(ids[i : i + 1], positions[i : i + 1]) % 1000 for i in range(len(ids))])
                top = (ids[:, None] + np.arange(k)) % self.info.vocab_size
                likely = np.tile((-values / 100)[:, None], (1, k))
                rows = pack_rows(TokenColumns(ids, -values / 100, values % 5 + 1, top, likely))
                found.append(PromptLogprobs(int(plan.handles[row]), int(positions[0]), rows))
        return found


@dataclass
class Answer:
    """All that came back for one handle."""

    token_ids: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)  # that drew each token
    logprobs: list[tuple[float, int, tuple[int, ...]]] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[float, int]] = field(default_factory=dict)
    pooled: list[float] | None = None
    reason: str | None = None
    stop_reason: int | None = None
    message: str | None = None
    queue_full: bool = False
    num_cached: int = -1


class Driver:
    """Runs a scheduler and an executor as the engine's loop does, one step a call."""

    def __init__(self, config: SchedulerConfig, executor: FakeExecutor, overlap: bool = True, check: bool = False):
        self.scheduler = Scheduler(config, executor.info)
        self.executor, self.overlap, self.check = executor, overlap, check
        self.answers: dict[int, Answer] = {}
        self._asked: dict[int, int | None] = {}
        self._first_pooled: dict[int, int] = {}
        self._in_flight: deque[tuple[StepPlan, _InFlight, int]] = deque()
        self.outputs: list[StepOutput] = []
        self.weights = 0  # how often they were changed
        self.prompt_logprobs_may_come_again = False

    def add(self, request: NewRequest) -> None:
        for handle in range(request.handle, request.handle + request.params.n):
            self.answers[handle] = Answer()
            self._asked[handle] = request.params.logprobs
            if request.pooling:
                self._first_pooled[handle] = len(request.prompt) - 1 if request.pooling == "last" else 0
        self.scheduler.add(request)

    def step(self) -> bool:
        """Plans and submits a step, reads the one before (without overlap: the same). False if nothing was done."""
        plan = self.scheduler.schedule()
        if plan is None and self._on_their_way():
            plan = empty_plan()
        worked = plan is not None or bool(self._in_flight)
        if not worked:
            self._note(self.scheduler.take_events())
        self._run(plan)
        if self.check:
            self.scheduler.check_integrity()
        return worked

    def _on_their_way(self) -> bool:
        stages = self.executor.info.stages
        return any(before.num_rows for before, _, _ in list(self._in_flight)[1 - stages :][: stages - 1])

    def _run(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self._in_flight.append((plan, self.executor.submit(plan), self.weights))
        depth = self.executor.info.stages - 1 + self.overlap if plan is not None else 0
        while len(self._in_flight) > depth:
            before, in_flight, weights = self._in_flight.popleft()
            self._note(self.scheduler.update(before, self.executor.collect(in_flight)), weights)

    def change_weights(self, recompute: bool = False) -> None:
        """As the engine does it, between two steps."""
        while self._on_their_way():
            self._run(empty_plan())
        self.weights = self.executor.weights = self.weights + 1
        self.scheduler.new_weights(recompute)
        if self.check:
            self.scheduler.check_integrity()

    def lose_the_pool(self) -> None:
        """As the engine does it when it is put to sleep."""
        while self._on_their_way():
            self._run(empty_plan())
        self._run(None)
        self.scheduler.give_up_kv()
        for pool in self.executor.pools + self.executor.host_pools:
            pool[:] = -1

    def run(self, most_steps: int = 100_000) -> None:
        """Until nothing is left; fails if that takes too long or a step does nothing twice in a row."""
        idle = 0
        for _ in range(most_steps):
            if not self.scheduler.has_work() and not self._in_flight:
                return
            idle = 0 if self.step() else idle + 1
            assert idle < 3, "requests wait, but nothing is scheduled"
        raise AssertionError(f"not done after {most_steps} steps")

    def _note(self, output: StepOutput | None, weights: int = 0) -> None:
        if output is None:
            return
        self.outputs.append(output)
        for started in output.started:
            assert self.answers[started.handle].num_cached == -1, "started twice"
            self.answers[started.handle].num_cached = started.num_cached_tokens
        handles, rows = output.arrays()
        for handle, token in zip(handles.tolist(), rows[:, 0].tolist(), strict=True):
            answer = self.answers[handle]
            assert answer.reason is None, "a token after the end"
            answer.token_ids.append(token)
            answer.weights.append(weights)
        if output.width > 1:
            columns = unpack_rows(rows)
            for i, handle in enumerate(handles.tolist()):
                if (k := self._asked[handle]) is not None:
                    top_ids = tuple(columns.top_ids[i, :k].tolist())
                    entry = (float(columns.logprobs[i]), int(columns.ranks[i]), top_ids)
                    self.answers[handle].logprobs.append(entry)
        for prompt in output.prompt_rows:
            answer = self.answers[prompt.handle]
            if prompt.handle in self._first_pooled:
                before = 0 if prompt.first == self._first_pooled[prompt.handle] else np.array(answer.pooled)
                answer.pooled = (before + np.asarray(prompt.rows)[0]).tolist()
                continue
            columns = unpack_rows(np.asarray(prompt.rows))
            for i in range(len(columns.ranks)):
                again = prompt.first + i in answer.prompt_logprobs
                assert self.prompt_logprobs_may_come_again or not again, "a prompt log-probability came twice"
                answer.prompt_logprobs[prompt.first + i] = (float(columns.logprobs[i]), int(columns.ranks[i]))
        for end in output.finished:
            answer = self.answers[end.handle]
            assert answer.reason is None, "ended twice"
            answer.reason, answer.stop_reason = end.reason, end.stop_reason
            answer.message, answer.queue_full = end.message, end.queue_full


def run_requests(
    requests: Iterable[NewRequest],
    config: SchedulerConfig,
    info: ExecutorInfo,
    executor: FakeExecutor | None = None,
    overlap: bool = True,
    arrivals: dict[int, int] | None = None,
    check: bool = False,
) -> tuple[dict[int, Answer], Scheduler]:
    """Runs requests to their ends. ``arrivals``: step at which a handle arrives (default 0: all together)."""
    driver = Driver(config, executor or FakeExecutor(info), overlap, check)
    waiting = sorted(requests, key=lambda r: (arrivals or {}).get(r.handle, 0))
    step = 0
    while waiting:
        while waiting and (arrivals or {}).get(waiting[0].handle, 0) <= step:
            driver.add(waiting.pop(0))
        driver.step()
        step += 1
    driver.run()
    assert not driver.executor.errors, driver.executor.errors[:3]
    return driver.answers, driver.scheduler


def request(handle: int, prompt: list[int] | np.ndarray, arrival: float = 0.0, **kwargs) -> NewRequest:
    """A request; sampling parameters and the fields of NewRequest by name."""
    own = {
        k: kwargs.pop(k) for k in ("stop_ids", "priority", "cache_salt", "adapter", "after", "pooling") if k in kwargs
    }
    return NewRequest(handle, np.asarray(prompt, np.int32), SamplingParams(**kwargs), arrival=arrival, **own)
