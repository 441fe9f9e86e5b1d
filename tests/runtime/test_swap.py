"""The host tier on the real device: what was swapped out comes back as it was, and nothing compiles or moves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime.executor import build_executor
from lmjax.runtime.host_pool import HostPool
from lmjax.runtime.programs import SWAP_IN, SWAP_OUT
from lmjax.runtime.state import MOST_WAITING, SWAP_BATCH, pack_swaps, swap_in, swap_out
from tests.fakes import request, run_requests
from tests.runtime.requests import Limited, random_requests, scheduler_config
from tests.runtime.test_equality import check_equal
from tests.runtime.tiny import tiny_config, tiny_executor

REQUESTS = 80


@pytest.fixture(scope="module")
def executor():
    return tiny_executor(swap_space=0.004)


@pytest.fixture(scope="module")
def requests():
    return random_requests(REQUESTS, seed=21)


def run(requests, executor, **config):
    rng = np.random.default_rng(5)
    arrivals = {r.handle: int(rng.integers(0, 100)) for r in requests}
    return run_requests(requests, scheduler_config(**config), executor.info, executor, arrivals=arrivals)


@pytest.fixture(scope="module")
def never_preempted(requests, executor):
    answers, scheduler = run(requests, Limited(executor, host=False), enable_prefix_caching=False)
    assert not scheduler.stats().preemptions
    return answers


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_a_swapped_request_has_the_tokens_of_one_that_ran_through(requests, executor, never_preempted, caching):
    """As recompute has; with all sampling features, forks and prefix hits. The buffers of calls are overwritten."""
    device = executor._device
    places = [pool.unsafe_buffer_pointer() for pool in device._pools]
    swapped, scheduler = run(
        requests,
        Limited(executor, num_blocks=26, mutate=True),
        preemption_mode="swap",
        enable_prefix_caching=caching,
    )
    stats = scheduler.stats()
    assert stats.swaps_out >= stats.swaps_in > 5 and stats.swapped_bytes > 0, stats
    check_equal(requests, never_preempted, swapped)
    recomputed, scheduler = run(requests, Limited(executor, num_blocks=26, host=False), enable_prefix_caching=caching)
    assert scheduler.stats().preemptions > 5
    check_equal(requests, never_preempted, recomputed)
    assert [pool.unsafe_buffer_pointer() for pool in device._pools] == places
    assert executor.stats()["compiles_total"] == 0


def test_evicted_prefixes_are_found_on_the_host(executor):
    """A prompt comes again after others have pushed it out of the device's pool."""
    rng = np.random.default_rng(1)
    cheap = replace(executor.info.host, out_seconds=1e-9, in_seconds=1e-9)
    limited = Limited(executor, num_blocks=30, host=cheap)
    prompts = [rng.integers(0, 300, 60) for _ in range(6)]
    asked = [request(i, prompt, temperature=0.0, max_tokens=8) for i, prompt in enumerate((*prompts, *prompts[:4]))]
    answers, scheduler = run_requests(
        asked, scheduler_config(), limited.info, limited, arrivals={r.handle: 20 * r.handle for r in asked}
    )
    assert all(answers[6 + i].token_ids == answers[i].token_ids for i in range(4))
    stats = scheduler.stats()
    assert [answers[6 + i].num_cached for i in range(4)] == [56] * 4 and stats.host_hits > 150, stats


def test_transfers_move_whole_blocks_through_more_buffers_than_there_are():
    """More transfers than may wait; a place is overwritten right after it was read; padding moves nothing."""
    rng = np.random.default_rng(0)
    pools = tuple(jnp.asarray(rng.normal(size=(2, 2, 9, heads, 4, 8)), jnp.float32) for heads in (1, 3))
    before = [np.asarray(pool) for pool in pools]
    host = HostPool(pools, (7, 7))
    out, back = jax.jit(swap_out), jax.jit(swap_in)
    for i in range(3 * MOST_WAITING):
        block = 1 + i % 8
        (pairs,) = pack_swaps([(0, block, 3), (1, block, 5), (1, block, 2)], 2)
        host.keep(out(pools, pairs), pairs)
        pairs[:] = 99  # as when the step's buffers are used again
        (pairs,) = pack_swaps([(0, 3, 8), (1, 2, 8)], 2)
        pools, done = back(pools, host.stage(pairs), pairs)
        host.staged(done)
        for pool, was in zip(pools, before, strict=True):
            np.testing.assert_array_equal(pool[:, :, 8], was[:, :, block])
            np.testing.assert_array_equal(pool[:, :, 1:8], was[:, :, 1:8])
        before = [np.asarray(pool) for pool in pools]


def test_swaps_are_packed_in_order():
    swaps = [(g, i, i + 100) for i in range(1, SWAP_BATCH + 3) for g in ((0, 1) if i < 4 else (0,))]
    first, second = pack_swaps(swaps, 2)
    assert first[0].tolist() == [[i, i + 100] for i in range(1, SWAP_BATCH + 1)]
    assert first[1].tolist() == [[i, i + 100] for i in range(1, 4)] + [[0, 0]] * (SWAP_BATCH - 3)
    assert second[0, :3].tolist() == [[17, 117], [18, 118], [0, 0]] and not second[1].any()
    assert pack_swaps([], 2) == []


def test_without_swap_space_there_is_none_of_it():
    executor = tiny_executor()
    assert executor.info.host is None and executor._device.host is None
    assert not {SWAP_OUT, SWAP_IN} & executor._device._programs.keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swap_space": -1.0}, "--swap-space: got -1.0, must be a number of GiB, 0 or more"),
        ({"swap_space": float("nan")}, "--swap-space: got nan, must be a number of GiB"),
        ({"swap_space": "4"}, "--swap-space: got '4'"),
        ({"preemption_mode": "swap"}, "--preemption-mode: swap needs host memory: give --swap-space"),
        ({"preemption_mode": "drop"}, "--preemption-mode: got 'drop', must be one of auto, recompute, swap"),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings).validate()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [(1e5, "--swap-space: got 100000 GiB, but only "), (1e-6, "--swap-space: got 1e-06 GiB, must be 0 or at least ")],
)
def test_more_than_there_is_and_less_than_a_block(space, message):
    with pytest.raises(ConfigError) as caught:
        build_executor(tiny_config(swap_space=space))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
