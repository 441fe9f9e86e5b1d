"""Adapters of the fake executor: what a row writes and reads is marked with the adapter in its slot."""

from __future__ import annotations

from lmjax.core.plan import ExecutorInfo, StepPlan

MARK = 1000  # weights are below it


class FakeAdapters:
    info: ExecutorInfo
    weights: int
    errors: list[str]
    adapter_slots: dict[int, int]  # slot -> adapter
    adapter_loads: int

    def load_adapters(self, plan: StepPlan) -> None:
        slots = [slot for _, slot in plan.adapter_loads]
        assert len(slots) == len(set(slots)), "two adapters for a slot in one step"
        for adapter, slot in plan.adapter_loads:
            assert 0 <= slot < self.info.max_loras and adapter > 0
            assert adapter not in self.adapter_slots.values(), "an adapter in two slots"
            self.adapter_slots[slot] = adapter
            self.adapter_loads += 1
        if plan.adapters is not None:
            assert len(plan.adapters) == plan.num_rows
            assert all(slot in self.adapter_slots for slot in plan.adapters.tolist() if slot >= 0), "an empty slot"

    def weights_of(self, plan: StepPlan, row: int) -> int:
        """What a row is computed with: the weights' version, and the adapter."""
        slot = -1 if plan.adapters is None else int(plan.adapters[row])
        return self.weights + (MARK * self.adapter_slots[slot] if slot >= 0 else 0)
