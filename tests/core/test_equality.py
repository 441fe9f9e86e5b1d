"""One answer: what a request gets does not depend on batching, chunks, prefix hits, preemption or overlap."""

import numpy as np
import pytest

from lmjax.config import SchedulerConfig
from tests.fakes import FakeExecutor, fake_info, full_spec, request, run_requests, window_spec

GROUPS = {"full": (full_spec(),), "full+window": (full_spec(), window_spec(40))}


def random_requests(count=200, seed=0, longest=150):
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, 1000, int(n)) for n in (16, 33, 64, 100)]
    found, handle = [], 0
    for _ in range(count):
        tail = rng.integers(0, 1000, int(rng.integers(1, 50)))
        prompt = np.concatenate((prefixes[rng.integers(4)], tail)) if rng.random() < 0.5 else tail
        n = int(rng.integers(2, 5)) if rng.random() < 0.15 else 1
        params = {
            "n": n,
            "temperature": float(rng.choice([0.0, 1.0])),
            "seed": int(rng.integers(2**40)) if rng.random() < 0.5 else None,
            "max_tokens": int(rng.integers(1, 60)),
            "logprobs": int(rng.integers(0, 5)) if rng.random() < 0.3 else None,
            "prompt_logprobs": 2 if rng.random() < 0.2 else None,
        }
        params["min_tokens"] = int(rng.integers(0, params["max_tokens"] + 1)) if rng.random() < 0.5 else 0
        stop_ids = tuple(int(i) for i in rng.choice(1000, int(rng.choice([0, 3, 40])), replace=False))
        params["stop_token_ids"] = list(stop_ids[:2])
        found.append(request(handle, prompt[:longest], stop_ids=stop_ids, **params))
        handle += n
    return found


def check_same(answers, expected):
    for handle, answer in expected.items():
        got = answers[handle]
        assert got.token_ids == answer.token_ids, handle
        assert (got.reason, got.stop_reason) == (answer.reason, answer.stop_reason), handle
        assert got.logprobs == answer.logprobs, handle
        assert got.prompt_logprobs == answer.prompt_logprobs, handle


def config(**changes):
    return SchedulerConfig(**{"max_num_batched_tokens": 64, **changes})


@pytest.fixture(scope="module", params=GROUPS)
def alone(request):
    specs = GROUPS[request.param]
    requests = random_requests()
    answers = {}
    for one in requests:
        found, _ = run_requests([one], config(enable_prefix_caching=False), fake_info(specs=specs), overlap=False)
        answers.update(found)
    return specs, requests, answers


WAYS = {
    "chunks of 16": ({"max_num_batched_tokens": 16}, {}),
    "chunks of 64": ({"max_num_batched_tokens": 64}, {}),
    "long prompts in chunks of 8": ({"long_prefill_token_threshold": 8}, {}),
    "chunks off": ({"max_num_batched_tokens": 256, "enable_chunked_prefill": False}, {}),
    "prefix cache off": ({"enable_prefix_caching": False}, {}),
    "small pool": ({}, {"num_blocks": 24}),
    "small pool, prefix cache off": ({"enable_prefix_caching": False}, {"num_blocks": 24}),
    "small pool, chunks off": ({"max_num_batched_tokens": 256, "enable_chunked_prefill": False}, {"num_blocks": 24}),
    "priority": ({"scheduling_policy": "priority"}, {"num_blocks": 40}),
    "swap": ({"preemption_mode": "swap"}, {"num_blocks": 24, "host": 200}),
    "swap, prefix cache off": (
        {"preemption_mode": "swap", "enable_prefix_caching": False},
        {"num_blocks": 24, "host": 200},
    ),
    "swap, little room": ({"preemption_mode": "swap"}, {"num_blocks": 24, "host": 16}),
    "swap, chunks of 8": ({"preemption_mode": "swap", "max_num_batched_tokens": 8}, {"num_blocks": 24, "host": 200}),
    "evicted prefixes": ({}, {"num_blocks": 40, "host": 400}),
    "more slots than tokens": ({"max_num_batched_tokens": 8}, {"max_num_seqs": 24}),
}


IN_TURN = [pytest.param(way, False, marks=[] if way == "small pool" else pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize(("way", "overlap"), [*((way, True) for way in WAYS), *IN_TURN])
def test_same_answers(alone, way, overlap):
    specs, requests, expected = alone
    changes, sizes = WAYS[way]
    rng = np.random.default_rng(5)
    arrivals = {r.handle: int(rng.integers(0, 150)) for r in requests}
    if way == "priority":
        for r in requests:
            r.priority = int(rng.integers(3))
    info = fake_info(specs=specs, **sizes)
    answers, scheduler = run_requests(requests, config(**changes), info, FakeExecutor(info), overlap, arrivals)
    check_same(answers, expected)
    stats = scheduler.stats()
    if way.startswith("small pool"):
        assert stats.preemptions >= 30
    if changes.get("enable_prefix_caching", True):
        assert stats.prefix_hits > 0
    if way.startswith("swap"):
        assert stats.swaps_out >= stats.swaps_in >= 20, stats
    if way == "evicted prefixes":
        assert stats.host_hits > 1000, stats
    scheduler.check_integrity()
    assert all(pool.num_free == pool.num_usable for pool in scheduler.state.kv.pools)
