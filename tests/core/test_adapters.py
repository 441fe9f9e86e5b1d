"""Adapters in slots: who is evicted, who waits, and that every request is computed with its own."""

from dataclasses import replace

import numpy as np
import pytest

from lmjax.config import SchedulerConfig
from lmjax.core.adapters import Adapters
from lmjax.core.block_hash import root_digest
from tests.core.test_equality import GROUPS, check_same, random_requests
from tests.fakes import Driver, FakeExecutor, fake_info, request, run_requests


def info(max_loras=2, **changes):
    return replace(fake_info(**changes), max_loras=max_loras)


def config(**changes):
    return SchedulerConfig(**{"max_num_batched_tokens": 64, **changes})


def driver(max_loras=2, **changes):
    return Driver(config(), FakeExecutor(info(max_loras, **changes)), check=True)


def on_device(made):
    return made.scheduler.adapters_on_device


def ids(seed, length=20):
    return np.random.default_rng(seed).integers(0, 1000, length)


def test_the_base_model_has_the_names_that_blocks_always_had():
    assert root_digest(None, None) == bytes(16)
    seen = []
    for adapter in (0, 1, 2, 1, 0):
        one = request(len(seen), ids(0, 40), max_tokens=2, adapter=adapter)
        seen.append(one)
    answers, _ = run_requests(seen, config(), info(), arrivals={i: 8 * i for i in range(5)})
    assert [answers[i].num_cached for i in range(5)] == [0, 0, 0, 32, 32]


WAYS = {
    "plenty": ({}, {}),
    "preemption": ({"num_blocks": 18}, {}),
    "swap": ({"num_blocks": 18, "host": 60}, {"preemption_mode": "swap"}),
    "no cache": ({}, {"enable_prefix_caching": False}),
    "small steps": ({}, {"max_num_batched_tokens": 8}),
}


def mixed_requests():
    rng = np.random.default_rng(5)
    return [replace(one, adapter=int(rng.integers(0, 7))) for one in random_requests(count=60, seed=3)]


@pytest.fixture(scope="module", params=GROUPS)
def alone(request):
    specs, asked, answers = GROUPS[request.param], mixed_requests(), {}
    for one in asked:
        found, _ = run_requests(
            [one], config(enable_prefix_caching=False), info(1, specs=specs, max_num_seqs=4), overlap=False
        )
        answers.update(found)
    return specs, asked, answers


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_seven_models_on_two_slots_answer_as_alone(alone, way, overlap):
    """Six adapters and the base model: random lengths, choices, prompt log-probabilities, prefix hits."""
    specs, asked, expected = alone
    device, changes = WAYS[way]
    executor = FakeExecutor(info(2, specs=specs, max_num_seqs=6, **device))
    arrivals = {one.handle: i // 2 for i, one in enumerate(asked)}
    answers, scheduler = run_requests(asked, config(**changes), executor.info, executor, overlap, arrivals, check=True)
    check_same(answers, expected)
    stats = scheduler.stats()
    assert (stats.preemptions > 0) == ("num_blocks" in device), stats
    assert stats.swaps_in > 0 or way != "swap"
    assert executor.adapter_loads > 6  # so some came back to a slot that they had lost


def test_the_wrong_adapter_changes_tokens():
    """The oracle above can tell."""
    one = request(0, ids(1), max_tokens=8, adapter=1)
    first, _ = run_requests([one], config(), info())
    second, _ = run_requests([replace(one, adapter=2)], config(), info())
    base, _ = run_requests([replace(one, adapter=0)], config(), info())
    assert len({tuple(found[0].token_ids) for found in (first, second, base)}) == 3


def test_of_those_nobody_uses_the_one_left_longest_ago_goes():
    made = driver(3)
    for handle, adapter in enumerate((1, 2, 3, 1, 4, 5)):  # one after the other
        made.add(request(handle, ids(handle), max_tokens=3, adapter=adapter))
        made.run()
        expected = {0: {1}, 1: {1, 2}, 2: {1, 2, 3}, 3: {1, 2, 3}, 4: {1, 3, 4}, 5: {1, 4, 5}}[handle]
        assert on_device(made) == expected
    assert made.executor.adapter_loads == 5


def test_what_runs_keeps_its_slot_and_others_pass_who_waits():
    made = driver(2)
    made.add(request(0, ids(0), max_tokens=30, adapter=1))
    made.add(request(1, ids(1), max_tokens=60, adapter=2))
    made.step()
    made.add(request(2, ids(2), max_tokens=3, adapter=3))  # has to wait for a slot
    made.add(request(3, ids(3), max_tokens=3, adapter=2))
    made.add(request(4, ids(4), max_tokens=3))
    for _ in range(8):
        made.step()
    assert made.answers[3].reason == made.answers[4].reason == "length"
    assert made.answers[2].num_cached == -1 and on_device(made) == {1, 2}
    made.run()
    assert made.answers[2].reason == "length" and on_device(made) == {2, 3}


def test_a_stream_of_others_does_not_starve_who_waits():
    """As many as may run at once pass; then the slot is closed to newcomers."""
    made = driver(1, max_num_seqs=4)
    for handle in range(3):
        made.add(request(handle, ids(handle), max_tokens=9 + 4 * handle, adapter=1))
    made.step()
    made.add(request(100, ids(100), max_tokens=4, adapter=2))
    handle = 3
    for _ in range(60):
        made.add(request(handle, ids(handle), max_tokens=9, arrival=1.0, adapter=1))
        handle += 1
        made.step()
        if made.answers[100].reason:
            break
    assert made.answers[100].reason == "length"
    passed = sum(made.answers[i].num_cached >= 0 for i in range(3, handle))
    assert passed == 4, passed
    made.run()
    assert all(answer.reason == "length" for answer in made.answers.values())


def test_taking_turns_is_in_batches():
    """Two adapters, one slot, arrivals in turn: not one request a load."""
    asked = [request(i, ids(i), max_tokens=10, arrival=float(i), adapter=1 + i % 2) for i in range(64)]
    executor = FakeExecutor(info(1, max_num_seqs=8))
    answers, _ = run_requests(asked, config(), executor.info, executor, check=True)
    assert all(answer.reason == "length" for answer in answers.values())
    assert executor.adapter_loads <= 14, executor.adapter_loads


def test_many_that_wait_cost_little(monkeypatch):
    """Each is looked at a few times, not once a step or once an end."""
    looks = 0
    admits = Adapters.admits

    def counted(self, one):
        nonlocal looks
        looks += 1
        return admits(self, one)

    monkeypatch.setattr(Adapters, "admits", counted)
    count = 400
    asked = [request(i, ids(i, 4), max_tokens=3, arrival=float(i), adapter=1 + i % 40) for i in range(count)]
    answers, _ = run_requests(asked, config(), info(4, max_num_seqs=8))
    assert all(answer.reason == "length" for answer in answers.values())
    assert looks < 6 * count, looks


def test_who_was_set_aside_can_be_aborted():
    made = driver(1)
    made.add(request(0, ids(0), max_tokens=20, adapter=1))
    made.step()
    for handle in (1, 2):
        made.add(request(handle, ids(handle), max_tokens=5, adapter=2, arrival=float(handle)))
    made.step()
    made.scheduler.abort([1])
    made.add(request(3, ids(3), max_tokens=5, adapter=1, arrival=3.0))
    made.run()
    assert [made.answers[i].reason for i in range(4)] == ["length", "abort", "length", "length"]


def test_choices_of_a_request_wait_together():
    made = driver(1, max_num_seqs=8)
    made.add(request(0, ids(0), max_tokens=20, adapter=1))
    made.step()
    made.add(request(10, ids(1), n=3, max_tokens=5, temperature=1.0, adapter=2))
    made.add(request(20, ids(2), n=3, max_tokens=5, temperature=1.0, adapter=1))
    made.run()
    assert all(answer.reason == "length" for answer in made.answers.values())


def test_a_forgotten_adapter_stays_until_its_last_request_has_ended():
    made = driver(2)
    made.add(request(0, ids(0), max_tokens=12, adapter=1))
    made.step()
    made.add(request(1, ids(1), max_tokens=3, adapter=1))
    made.scheduler.forget_adapter(1)
    made.scheduler.forget_adapter(2)  # of which there is none
    assert made.scheduler.take_dropped_adapters() == [2]
    for _ in range(6):
        made.step()
        assert made.scheduler.take_dropped_adapters() == [] and on_device(made) == {1}
    made.run()
    assert [made.answers[i].reason for i in range(2)] == ["length", "length"]
    assert made.scheduler.take_dropped_adapters() == [1] and on_device(made) == set()
    # its slot is the first to be given out again
    made.add(request(2, ids(2), max_tokens=3, adapter=3))
    made.run()
    assert on_device(made) == {3}


def test_plans_of_the_base_model_say_nothing_of_adapters():
    made = driver(2)
    plans = []
    submit = made.executor.submit
    made.executor.submit = lambda plan: plans.append(plan) or submit(plan)
    made.add(request(0, ids(0), max_tokens=12))
    made.add(request(1, ids(1), max_tokens=4, adapter=5))
    made.run()
    with_adapter = [plan for plan in plans if plan.adapters is not None]
    assert 0 < len(with_adapter) < len(plans)
    assert sum(map(len, (plan.adapter_loads for plan in plans))) == 1 and plans[0].adapter_loads == [(5, 0)]
    for plan in with_adapter:
        assert (plan.adapters[plan.handles == 0] == -1).all() and (plan.adapters[plan.handles == 1] == 0).all()


def test_weights_change_and_the_pool_goes():
    asked = [request(i, ids(i), max_tokens=30, adapter=i % 4) for i in range(12)]
    made = driver(2)
    for one in asked:
        made.add(one)
    for _ in range(6):
        made.step()
    made.change_weights(recompute=True)
    made.step()
    made.lose_the_pool()
    made.run()
    assert all(answer.reason == "length" for answer in made.answers.values()) and not made.executor.errors
