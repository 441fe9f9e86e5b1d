"""Groups of requests in the stages of a pipeline: answers, order, balance and the size of steps."""

import dataclasses

import numpy as np
import pytest

from tests.core.test_equality import GROUPS, check_same, config, random_requests
from tests.fake_pipeline import FakePipeline
from tests.fakes import fake_info, request, run_requests

WAYS = {
    "roomy": ({}, {}),
    "chunks of 16": ({"max_num_batched_tokens": 16}, {}),
    "small pool": ({}, {"num_blocks": 24}),
    "small pool, prefix cache off": ({"enable_prefix_caching": False}, {"num_blocks": 24}),
    "swap": ({"preemption_mode": "swap"}, {"num_blocks": 24, "host": 200}),
    "swap, prefix cache off": (
        {"preemption_mode": "swap", "enable_prefix_caching": False},
        {"num_blocks": 24, "host": 200},
    ),
    "few slots": ({}, {"max_num_seqs": 5}),
    "priority": ({"scheduling_policy": "priority"}, {"num_blocks": 40}),
}


@pytest.fixture(scope="module", params=GROUPS)
def alone(request):
    specs = GROUPS[request.param]
    requests = random_requests(70, seed=3)
    answers, _ = run_requests(requests, config(), fake_info(specs=specs))
    return specs, requests, answers


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["overlap", "in turn"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_same_answers(alone, way, stages, overlap):
    specs, requests, expected = alone
    changes, sizes = WAYS[way]
    rng = np.random.default_rng(5)
    arrivals = {r.handle: int(rng.integers(0, 70)) for r in requests}
    if way == "priority":
        requests = [dataclasses.replace(r, priority=int(rng.integers(3))) for r in requests]
    info = fake_info(specs=specs, stages=stages, **sizes)
    answers, scheduler = run_requests(requests, config(**changes), info, FakePipeline(info), overlap, arrivals, True)
    check_same(answers, expected)
    stats = scheduler.stats()
    if way.startswith("small pool"):
        assert stats.preemptions >= 10
    if way.startswith("swap"):
        assert stats.swaps_out >= stats.swaps_in >= 5
    if changes.get("enable_prefix_caching", True):
        assert stats.prefix_hits > 0
    assert all(pool.num_free == pool.num_usable for pool in scheduler.state.kv.pools)


def decoding(stages, count, max_tokens=200, **sizes):
    """Requests that decode from the start, and what ran them."""
    info = fake_info(stages=stages, **sizes)
    pipeline = FakePipeline(info)
    requests = [request(i, [7 + i], max_tokens=max_tokens) for i in range(count)]
    return requests, info, pipeline


@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 7), (4, 4), (4, 16)])
def test_no_tick_is_idle_and_each_request_has_every_pth(stages, count):
    requests, info, pipeline = decoding(stages, count)
    run_requests(requests, config(), info, pipeline)
    steady = pipeline.entered[4 * stages : 150 * stages]
    assert all(plan.num_rows for plan in steady)
    ticks = {r.handle: [t for t, plan in enumerate(steady) if r.handle in plan.handles] for r in requests}
    for taken in ticks.values():
        assert set(np.diff(taken).tolist()) == {stages}
    sizes = [plan.num_rows for plan in steady]
    assert max(sizes) <= -(-count // stages)


def test_groups_are_levelled_when_requests_end():
    """Half of the requests, all in two of the four groups, end early: the others spread over all groups."""
    requests, info, pipeline = decoding(4, 16)
    plans = iter(requests)
    short = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, max_tokens=40)) for r in plans if r.handle % 4 < 2
    ]
    rest = [r for r in requests if r.handle % 4 >= 2]
    run_requests(short + rest, config(), info, pipeline)
    late = pipeline.entered[400:600]
    assert [plan.num_rows for plan in late].count(2) == len(late)


def test_a_long_prompt_comes_in_equal_parts_and_holds_nobody_up():
    """2,048 tokens into a running batch: no step beyond its share of the budget, and decode rows keep their pace."""
    stages, budget = 4, 512
    share = budget // stages
    info = fake_info(stages=stages, max_model_len=4096, token_buckets=(8, 16, 32, 64, share), num_blocks=1024)
    pipeline = FakePipeline(info)
    rng = np.random.default_rng(0)
    running = [request(i, [7 + i], max_tokens=200) for i in range(8)]
    long = request(8, rng.integers(0, 1000, 2048), max_tokens=20)
    run_requests([*running, long], config(max_num_batched_tokens=share), info, pipeline, arrivals={8: 100})
    with_prefill = [t for t, plan in enumerate(pipeline.entered) if 8 in plan.handles and len(plan.token_ids)]
    assert max(plan.num_tokens for plan in pipeline.entered) <= share
    assert with_prefill == list(range(with_prefill[0], with_prefill[0] + len(with_prefill))), "a chunk every tick"
    for r in running:
        ticks = [t for t, plan in enumerate(pipeline.entered) if r.handle in plan.handles]
        during = [t for t in ticks if with_prefill[0] <= t <= with_prefill[-1]]
        assert set(np.diff(during).tolist()) == {stages}
    full = [pipeline.entered[t].num_tokens for t in with_prefill]
    assert full[:16] == [share] * 16
    # a tick has the bucket of the largest step that some stage holds
    held = [pipeline.entered[t - stages + 1 : t + 1] for t in range(with_prefill[0], with_prefill[-1] + stages)]
    buckets = [min(b for b in info.token_buckets if b >= max(plan.num_tokens for plan in plans)) for plans in held]
    real = sum(plan.num_tokens for plans in held for plan in plans)
    padded = 1 - real / (stages * sum(buckets))
    print(f"padded share of the {len(held)} ticks in which the prompt is under way: {padded:.3f}")
    assert padded < 0.2
