"""What the scheduler costs: host work, hashing, and KV slots that nobody uses."""

import gc
import sys
import time

import numpy as np
import pytest

from lmjax.config import SchedulerConfig
from tests.fakes import Driver, FakeExecutor, fake_info, request


def bytecodes(run) -> int:
    """Python bytecodes that ``run`` executes: a measure of host work that no other process disturbs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # a callback of the collector would be counted
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def decode_step_bytecodes(running=8, waiting=0, context=40, logprobs=None) -> int:
    """Of schedule + update of a step of decodes in which nothing arrives, ends or fills a block."""
    info = fake_info(
        num_blocks=running * 64 + 1, max_num_seqs=running, max_model_len=1024, max_logprobs=5, token_buckets=(1, 2**16)
    )
    executor = FakeExecutor(info, cheap=True)
    driver = Driver(SchedulerConfig(max_num_batched_tokens=2**16), executor)
    for i in range(running):
        driver.add(request(i, np.full(context, i), max_tokens=500, logprobs=logprobs, stop_ids=(3, 4)))
    driver.step()
    driver.step()
    for i in range(running, running + waiting):
        driver.add(request(i, [1, 2, 3]))
    scheduler = driver.scheduler
    while scheduler.state.table.planned[0] % 16 not in (4, 5):
        driver.step()
    driver.step()
    plan, in_flight, _ = driver._in_flight.popleft()
    result = executor.collect(in_flight)

    def step():
        assert scheduler.schedule().num_decode == running
        assert len(scheduler.update(plan, result).handles) == running

    return bytecodes(step)


def test_a_decoding_request_costs_no_python():
    base = decode_step_bytecodes()
    assert 200 < base < 2000
    assert decode_step_bytecodes(running=64) == base
    assert decode_step_bytecodes(running=64, logprobs=3) == decode_step_bytecodes(logprobs=3) < 1.5 * base


def test_the_waiting_and_the_context_cost_nothing():
    base = decode_step_bytecodes(waiting=1)
    assert decode_step_bytecodes(waiting=2000) == base
    assert decode_step_bytecodes(context=840) == decode_step_bytecodes()


def test_adding_to_a_long_queue_costs_its_logarithm():
    driver = Driver(SchedulerConfig(max_num_batched_tokens=64), FakeExecutor(fake_info(max_num_seqs=1), cheap=True))
    costs = []
    for i in range(4000):
        new = request(i, [1, 2, 3], arrival=float(-i))  # the worst case: each becomes the first
        if i % 1000 == 100:
            costs.append(bytecodes(lambda new=new: driver.scheduler.add(new)))
        else:
            driver.scheduler.add(new)
    assert len(costs) == 4 and max(costs) <= min(costs) + 20


def lognormal(rng, median, mean, n):
    return np.maximum(1, rng.lognormal(np.log(median), np.sqrt(2 * np.log(mean / median)), n).astype(int))


def test_unused_kv_slots_are_under_four_percent():
    rng = np.random.default_rng(0)
    info = fake_info(num_blocks=20_000, max_num_seqs=64, max_model_len=4096, token_buckets=(64, 128, 256, 512))
    driver = Driver(SchedulerConfig(max_num_batched_tokens=512), FakeExecutor(info, cheap=True))
    prompts, replies = lognormal(rng, 150, 340, 300), lognormal(rng, 140, 220, 300)
    for i, (n, reply) in enumerate(zip(prompts.tolist(), replies.tolist(), strict=True)):
        driver.add(request(i, rng.integers(0, 1000, min(n, 3000)), max_tokens=min(reply, 1000)))
    state = driver.scheduler.state
    allocated = used = 0
    while len(state.queue):  # as long as all slots are taken
        driver.step()
        open_slots = state.table.handles >= 0
        allocated += state.kv.pools[0].num_used * 16
        used += int(state.table.computed[open_slots].sum())
    assert used > 1_000_000
    assert 0 < (allocated - used) / used < 0.04


def share_of_hashing(prompt_tokens) -> float:
    rng = np.random.default_rng(0)
    info = fake_info(num_blocks=4000, max_num_seqs=32, token_buckets=(32, 64, 512))
    driver = Driver(SchedulerConfig(max_num_batched_tokens=512), FakeExecutor(info, cheap=True, step_seconds=0.01))
    for i in range(40):
        driver.add(request(i, rng.integers(0, 1000, prompt_tokens), max_tokens=30))
    began = time.perf_counter()
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.prefix_hits == 0 and stats.steps > 30 and stats.hash_seconds > 0
    return stats.hash_seconds / (time.perf_counter() - began)


@pytest.mark.slow  # on a busy machine the caches are cold at every try, and none is below
@pytest.mark.parametrize("prompt_tokens", [20, 340])
def test_hashing_and_look_up_take_under_one_percent_with_nothing_shared(prompt_tokens):
    assert any(share_of_hashing(prompt_tokens) < 0.01 for _ in range(20))


def naming_bytecodes(num_blocks) -> tuple[int, int]:
    """Of looking a prompt of ``num_blocks`` full blocks up, with nothing shared, and of naming what it has computed."""
    driver = Driver(SchedulerConfig(max_num_batched_tokens=8192), FakeExecutor(fake_info(num_blocks=2000), cheap=True))
    driver.add(request(0, np.arange(16 * num_blocks + 1), max_tokens=30))
    state = driver.scheduler.state
    [waiting] = state.requests.values()
    look_up = bytecodes(lambda: state.lookup(waiting))
    named = []
    name = state.name_blocks
    state.name_blocks = lambda *where: named.append(bytecodes(lambda: name(*where)))
    driver.run()
    return look_up, named[0]


def test_hashing_and_look_up_cost_a_few_bytecodes_a_block():
    """A look-up takes 38, naming 25, both beside one BLAKE2 of the block."""
    short, long = (np.array(naming_bytecodes(n)) for n in (10, 30))
    look_up, name = (long - short) / 20
    assert 0 < look_up < 50 and 0 < name < 35
    assert (short < 1000).all()
