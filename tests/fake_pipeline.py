"""FakeExecutor in stages: each has tables and KV of its own, and sees a step one tick after the stage before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from lmjax.core.plan import ExecutorInfo, StepPlan, StepResult, empty_plan
from tests.fakes import FakeExecutor, _arrays


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    inputs: list[np.ndarray]
    copy: list[np.ndarray]  # the plan's arrays as they were at submit
    result: StepResult | None = None


@dataclass
class FakePipeline:
    """Implements ``lmjax.core.plan.Executor``. Slots are loaded when a step enters and read when it leaves, as on a
    device: a slot, a block or a table that is used again too early changes a token."""

    info: ExecutorInfo
    errors: list[str] = field(default_factory=list)
    ticks: int = 0
    idle: int = 0

    def __post_init__(self) -> None:
        self.stages = [FakeExecutor(self.info, errors=self.errors) for _ in range(self.info.stages)]
        for stage in self.stages[1:]:
            stage.tokens, stage.loads = self.stages[0].tokens, self.stages[0].loads
        self.steps: deque[_Step] = deque(maxlen=self.info.stages)
        self.entered: list[StepPlan] = []
        self.held_at_a_change = 0  # steps that were in the pipeline when the weights changed

    @property
    def weights(self) -> int:
        return self.stages[0].weights

    @weights.setter
    def weights(self, weights: int) -> None:
        self.held_at_a_change += sum(step.plan.num_rows > 0 for step in list(self.steps)[: self.info.stages - 1])
        for stage in self.stages:
            stage.weights = weights

    def submit(self, plan: StepPlan) -> _Step:
        first, last = self.stages[0], self.stages[-1]
        first._load(plan)
        first._check_plan(plan)
        rows = -(-self.info.max_num_seqs // self.info.stages)
        assert plan.num_rows <= rows, "more rows than a step has"
        self.ticks += 1
        self.idle += plan.num_rows == 0
        self.entered.append(plan)
        step = _Step(plan, first._inputs(plan), [a.copy() for a in _arrays(plan)])
        self.steps.appendleft(step)
        for stage, held in zip(self.stages, self.steps, strict=False):
            hashes = stage._forward(held.plan, held.inputs)
            if stage is last:
                held.result = stage._sample(held.plan, hashes)
        return step

    def collect(self, step: _Step) -> StepResult:
        for before, now in zip(step.copy, _arrays(step.plan), strict=True):
            assert np.array_equal(before, now), "a plan changed while its step ran"
        if not step.plan.num_rows:
            return StepResult(np.zeros((0, 1), np.int32))
        assert step.result is not None, "collected before it was done"
        return step.result

    def stats(self) -> dict[str, float]:
        return {"compiles_total": 0.0, "padded_tokens_total": 0.0, "device_seconds": 0.0}

    def close(self) -> None:
        pass


def drain(pipeline: FakePipeline) -> None:
    for _ in range(pipeline.info.stages):
        pipeline.submit(empty_plan())
