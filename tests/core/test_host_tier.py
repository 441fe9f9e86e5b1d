"""The host tier: what goes there, what comes back, what is let go; and the rule that decides. The equality of tokens is
in test_equality.py, the books under random requests in test_scheduler_random.py."""

import numpy as np
import pytest

from lmjax.config import SchedulerConfig
from lmjax.core.block_pool import BlockPool
from lmjax.core.request import State
from lmjax.core.swap_cost import SwapCosts
from tests.fakes import Driver, FakeExecutor, fake_info, full_spec, host_info, request, window_spec
from tests.runtime.tiny import make_plan

SMALL = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4, "max_model_len": 128}


def driver(transfer=1e-6, places=100, specs=(full_spec(),), sizes=None, **config):
    info = fake_info(specs=specs, host=host_info((places,) * len(specs), transfer), **{**SMALL, **(sizes or {})})
    config = {"max_num_batched_tokens": 64, "preemption_mode": "swap", **config}
    return Driver(SchedulerConfig(**config), FakeExecutor(info), check=True)


def crowd(one, count=3, tokens=24, reply=24):
    """Requests that cannot all stay."""
    rng = np.random.default_rng(0)
    for handle in range(count):
        one.add(request(handle, rng.integers(0, 900, tokens), max_tokens=reply))


def until_swapped(one):
    """Steps until a preempted request has something on the host; the request."""
    for _ in range(200):
        for waiting in one.scheduler.state.requests.values():
            if waiting.saved is not None and waiting.saved.swapped and waiting.state is State.WAITING:
                return waiting
        one.step()
    raise AssertionError("nothing was swapped out")


def idle(one):
    """All is free again, and no place on the host is held for anybody."""
    one.scheduler.check_integrity()
    assert not one.executor.errors
    state = one.scheduler.state
    assert all(pool.num_free == pool.num_usable for pool in (*state.kv.pools, *state.tier.pools))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("specs", [(full_spec(),), (full_spec(), window_spec(9))], ids=["full", "full+window"])
def test_a_swapped_request_computes_one_token_when_it_is_back(caching, specs):
    one = driver(specs=specs, enable_prefix_caching=caching)
    crowd(one)
    one.run()
    stats = one.scheduler.stats()
    assert stats.swaps_out == stats.swaps_in == stats.preemptions > 0
    # each prompt once, each reply token but the last once, and none twice
    assert stats.scheduled_tokens == 3 * (24 + 23)
    bytes_moved = (stats.swapped_out_blocks + stats.swapped_in_blocks) * 4 * specs[0].bytes_per_token()
    assert stats.swapped_bytes == bytes_moved > 0
    idle(one)


def test_an_abort_gives_the_places_back():
    one = driver()
    crowd(one)
    request = until_swapped(one)
    tier = one.scheduler.state.tier
    assert tier.usage > 0 and tier.pools[0].num_used > 0
    one.scheduler.abort([request.handle])
    one.scheduler.check_integrity()
    one.run()
    idle(one)
    assert not [name for pool in tier.pools for name in pool.by_digest if len(name) > 16], "names of its own are left"


def test_without_room_on_the_host_the_rest_is_computed_again():
    one = driver(places=3)
    crowd(one)
    one.run()
    stats = one.scheduler.stats()
    assert stats.swapped_out_blocks > 0 and stats.scheduled_tokens > 3 * (24 + 23)
    assert [len(one.answers[i].token_ids) for i in range(3)] == [24] * 3
    idle(one)


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_the_rule_takes_what_is_cheaper(mode):
    """A token takes 1 ms."""
    swaps = {}
    for transfer in (1e-6, 10.0):
        one = driver(transfer, preemption_mode=mode, enable_prefix_caching=False)
        crowd(one)
        one.run()
        assert one.scheduler.stats().preemptions > 0
        swaps[transfer] = one.scheduler.stats().swaps_in
    expected = {"auto": (True, False), "swap": (True, True), "recompute": (False, False)}[mode]
    assert (swaps[1e-6] > 0, swaps[10.0] > 0) == expected


@pytest.mark.parametrize(("transfer", "hits"), [(1e-6, True), (1e-3, False)])
def test_evicted_prefixes_are_kept_if_that_pays(transfer, hits):
    """Four blocks of 4 ms move in one transfer; but only one block in eight is read again."""
    one = driver(transfer * 4, sizes={"max_num_seqs": 1})
    prompts = [np.random.default_rng(i).integers(0, 900, 41) for i in range(4)]
    for handle, prompt in enumerate((*prompts, prompts[0])):
        one.add(request(handle, prompt, max_tokens=2))
        one.run()
    stats = one.scheduler.stats()
    assert (stats.host_hits > 0) == hits and (one.answers[4].num_cached > 0) == hits
    assert stats.host_queries >= 4 * 41
    idle(one)


def test_a_place_is_not_given_out_twice_in_a_plan():
    one = driver(places=8)  # few, so that they are used again at once
    submit = one.executor.submit

    def checked(plan):
        targets = [(g, place) for g, _, place in plan.swaps_out]
        assert len(set(targets)) == len(targets)
        return submit(plan)

    one.executor.submit = checked
    crowd(one, count=6)
    one.run()
    assert one.scheduler.stats().swaps_in > 0
    idle(one)


def test_costs_are_learnt_from_steps():
    costs = SwapCosts(host_info((100,), 1e-3))
    assert costs.recompute(0, 100) == pytest.approx(100e-3 + 5000e-6)
    rng = np.random.default_rng(0)
    step, token, pair, out, back = 0.02, 4e-3, 2e-6, 0.05, 0.02  # four, two, fifty and twenty times the start
    for _ in range(300):
        n, start = int(rng.integers(1, 500)), int(rng.integers(0, 3000))
        plan = make_plan(prefill=[(0, start, [1] * n, True)])
        plan.swaps_out = [(0, 1, 1)] * int(rng.integers(0, 40))
        plan.swaps_in = [(0, 1, 1)] * int(rng.integers(0, 40))
        moved = -(-len(plan.swaps_out) // 4) * out + -(-len(plan.swaps_in) // 4) * back
        seconds = step + n * token + n * (start + n / 2) * pair + moved
        costs.observe(plan, seconds * float(rng.uniform(0.9, 1.1)))
    assert costs.recompute(0, 2000) == pytest.approx(2000 * token + 2e6 * pair, rel=0.25)
    # slower, and never above: they are a few per cent of these steps, and what was measured at the start counts longer
    assert 10 * 2e-3 < costs.swap_out(8) < 1.2 * 2 * out and 5 * 2e-3 < costs.swap_in(5) < 1.2 * 2 * back
    before = costs.recompute(0, 2000)
    costs.observe(make_plan(prefill=[(0, 0, [1], True)]), 0.0)  # the executor could not tell
    assert costs.recompute(0, 2000) == before


def test_a_forgotten_block_is_free_and_found_by_nobody():
    rng = np.random.default_rng(0)
    pool, held = BlockPool(20), []
    for i in range(2000):
        kind = rng.integers(4)
        if kind == 0 and pool.num_free:
            block = pool.allocate(1)
            pool.register(block, [i.to_bytes(16, "little")])
            held.append(block)
        elif kind == 1 and held:
            pool.release(held.pop(rng.integers(len(held))))
        elif kind == 2 and pool.by_digest:
            name = list(pool.by_digest)[rng.integers(len(pool.by_digest))]
            pool.forget(name)
            assert name not in pool.by_digest
        else:
            pool.forget(b"nobody")
        pool.check_integrity()
        assert pool.num_used == len(held)
