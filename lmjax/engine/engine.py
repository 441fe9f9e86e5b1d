"""The loop: drain the inbox -> plan -> submit -> collect the previous -> publish.

With overlap, step k+1 is planned and submitted before step k is read, so the host's work hides behind the device's.
Nothing here looks at single rows: a step costs the same few array copies for 1 row and for 256.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from lmjax.core.plan import Executor, StepPlan, empty_plan
from lmjax.core.scheduler import Scheduler
from lmjax.engine.columns import engine_stats, new_request, step_record
from lmjax.engine.live import Live
from lmjax.engine.loras import Loras
from lmjax.engine.records import (
    AbortRequest,
    AddRequest,
    ControlReply,
    Inbound,
    LoadLora,
    LoadWeights,
    Shutdown,
    Sleep,
    StepRecord,
    UnloadLora,
    WakeUp,
)
from lmjax.engine.watchdog import Watchdog
from lmjax.protocol import EngineStats
from lmjax.types import AdapterError

Receive = Callable[[float | None], Sequence[Inbound]]  # waits up to so many seconds for messages; None: for ever

_STATS_PERIOD = 0.1  # seconds between two snapshots
_QUIET = 0.05  # idle for so long: time for the integrity check
_STUCK = 0.02  # there is work, but none of it can be planned: look again after so long


class Engine:
    """Scheduler and executor of one model. Not thread-safe: one thread calls it.

    ``publish`` gets each step's record, and what ``live`` answers. ``overlap``: one step more in flight than the
    executor has stages. ``most_loras``: adapters that may be loaded at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        publish: Callable[[StepRecord | ControlReply], None],
        *,
        overlap: bool = True,
        most_loras: int = 0,
    ):
        self.scheduler, self.executor = scheduler, executor
        self._publish = publish
        self._stages = executor.info.stages
        self._depth = self._stages - 1 + overlap  # steps that stay in flight
        self._in_flight: deque[tuple[StepPlan, Any, int | str]] = deque()  # with the version of its weights
        self.live = Live(self, publish)
        self.loras = Loras(self, most_loras)
        self._stopping = False
        self._host_seconds = 0.0
        self._next_stats = 0.0

    def run(self, receive: Receive, watchdog: Watchdog | None = None) -> None:
        """Until ``Shutdown`` arrives. Sleeps in ``receive`` when there is nothing to do."""
        step = self.step if watchdog is None else watchdog.watched(self.step)
        progress = True
        while not self._stopping:
            if self.busy or self.live.busy:
                messages = receive(0.0 if progress else _STUCK)
            else:
                messages = receive(_QUIET) or self._rest(receive)
            for message in messages:
                self.handle(message)
            progress = step()

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or (self.scheduler.has_work() and not self.live.level)

    def handle(self, message: Inbound) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequest():
                self.scheduler.abort(message.handles)
            case LoadWeights() | Sleep() | WakeUp() | LoadLora() | UnloadLora():
                self.live.order(message)
            case Shutdown():
                self._stopping = True

    def _add(self, message: AddRequest) -> None:
        try:
            adapter = self.loras.number(message.lora)
        except AdapterError as error:  # it went while the request was on its way
            for handle in range(message.handle, message.handle + message.params.n):
                self.scheduler.refuse(handle, str(error))
            return
        self.scheduler.add(new_request(message, adapter))

    def step(self) -> bool:
        """Submits one step and collects one: with overlap the one before. False if there was nothing to do.

        A pipeline's step is collected as many steps later as it has stages.
        """
        self.live.poll()
        begin = time.perf_counter()
        plan = None if self.live.level else self.scheduler.schedule()
        if plan is None and self._on_their_way():
            plan = empty_plan()
        return self._advance(plan, begin)

    def flush(self) -> None:
        """Pushes what is in the stages of a pipeline out of them: no step is computed with two sets of weights."""
        while self._on_their_way():
            self._advance(empty_plan(), time.perf_counter())

    def drain(self) -> None:
        """Nothing is in flight afterwards."""
        self.flush()
        while self._in_flight:
            self._advance(None, time.perf_counter())

    def _advance(self, plan: StepPlan | None, begin: float) -> bool:
        """Submits the plan, if any, and collects a step, if it is time. False if it did neither."""
        if plan is not None:
            self._in_flight.append((plan, self.executor.submit(plan), self.live.version))
        done = None
        if len(self._in_flight) > (0 if plan is None else self._depth):
            done = self._in_flight.popleft()
        output, waited = None, 0.0
        if done is not None:
            submitted = time.perf_counter()
            result = self.executor.collect(done[1])
            waited = time.perf_counter() - submitted
            output = self.scheduler.update(done[0], result)
            if self.executor.info.max_loras:
                self.loras.drop_unused()
        record = step_record(output or self.scheduler.take_events())
        if done is not None and record is not None:
            record.version = done[2]
        now = time.perf_counter()
        if record is not None or now >= self._next_stats:
            self._tell(record or StepRecord(), now)
        self._host_seconds += time.perf_counter() - begin - waited
        return plan is not None or done is not None

    def _on_their_way(self) -> bool:
        """Whether a stage but the last holds a step: it needs others to push it on."""
        return any(plan.num_rows for plan, _, _ in islice(reversed(self._in_flight), self._stages - 1))

    def stats(self) -> EngineStats:
        """A snapshot; it takes ``iteration_tokens`` with it."""
        return engine_stats(self.scheduler.stats(), self.executor.stats(), self._host_seconds)

    def _tell(self, record: StepRecord, now: float) -> None:
        if now >= self._next_stats:
            record.stats = self.stats()
            self._next_stats = now + _STATS_PERIOD
        self._publish(record)

    def _rest(self, receive: Receive) -> Sequence[Inbound]:
        """The engine is idle: the last numbers are told and the books are checked, then it sleeps."""
        self._publish(StepRecord(stats=self.stats()))
        self.scheduler.check_integrity()
        return receive(None)
