"""Random arrivals, aborts, forks and preemptions: the books are right after every step and nobody starves."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmjax.config import SchedulerConfig
from tests.fakes import Driver, FakeExecutor, fake_info, full_spec, host_info, request, window_spec

GROUPS = {"full": (full_spec(),), "full+window": (full_spec(), window_spec(12)), "window": (window_spec(12, (0,)),)}
SWAPS = dict.fromkeys((None, "swap", "auto", "recompute"), 0)
STEPS = dict.fromkeys(GROUPS, 0)


def random_host(rng, groups):
    """From no room to plenty, from slow transfers to fast ones."""
    return host_info(tuple(rng.integers(2, 50, groups).tolist()), 10.0 ** -rng.integers(1, 6))


def run_random(specs, seed, policy, overlap, caching, chunked, mode=None, steps=60):
    """mode: of preemption, with a host tier; None: without one."""
    rng = np.random.default_rng(seed)
    info = fake_info(
        specs=specs,
        num_blocks=int(rng.integers(12, 40)),
        block_size=4,
        max_num_seqs=6,
        max_model_len=64,
        vocab_size=50,
        host=random_host(rng, len(specs)) if mode else None,
    )
    config = SchedulerConfig(
        max_num_batched_tokens=int(rng.integers(3, 40)) if chunked else 64,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        scheduling_policy=policy,
        max_num_queued_reqs=12,
        preemption_mode=mode or "auto",
    )
    driver = Driver(config, FakeExecutor(info), overlap, check=True)
    prefix = rng.integers(0, 50, 24)
    handle = done = 0
    for _ in range(steps):
        for _ in range(int(rng.poisson(0.6))):
            prompt = np.concatenate((prefix[: rng.integers(0, 24)], rng.integers(0, 50, int(rng.integers(1, 20)))))
            n = int(rng.choice([1, 1, 1, 2, 4]))
            stops = tuple(rng.integers(0, 50, int(rng.choice([0, 2, 12]))).tolist())
            one = request(
                handle,
                prompt,
                n=n,
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.integers(2)),
                stop_ids=stops,
                priority=int(rng.integers(3)),
                prompt_logprobs=[None, None, 1][rng.integers(3)],
                cache_salt=[None, None, "salt"][rng.integers(3)],
            )
            driver.add(one)
            handle += n
        if rng.random() < 0.15 and handle:
            driver.scheduler.abort(rng.integers(0, handle, 2).tolist())
        driver.step()
        done += 1
    began = driver.executor.steps
    driver.run(most_steps=3000)
    assert not driver.executor.errors, driver.executor.errors[:3]
    assert all(answer.reason is not None for answer in driver.answers.values())
    assert all(pool.num_free == pool.num_usable for pool in driver.scheduler.state.kv.pools)
    SWAPS[mode] += driver.scheduler.stats().swaps_in
    assert driver.scheduler.stats().num_waiting == 0
    return done + driver.executor.steps - began


@pytest.mark.parametrize("groups", GROUPS)
def test_books_are_right_after_every_step(groups):
    total = 0

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(
        seed=st.integers(0, 2**32),
        policy=st.sampled_from(["fcfs", "priority"]),
        overlap=st.booleans(),
        caching=st.booleans(),
        chunked=st.booleans(),
        mode=st.sampled_from([None, "swap", "auto", "recompute"]),
    )
    def run(seed, policy, overlap, caching, chunked, mode):
        nonlocal total
        total += run_random(GROUPS[groups], seed, policy, overlap, caching, chunked, mode)

    run()
    STEPS[groups] = total
    assert SWAPS["swap"] > 10 and SWAPS["auto"] > 10 and not SWAPS["recompute"] and not SWAPS[None], SWAPS
    assert total >= 3400, "too few steps for 10,000 in all"
