"""The loop: equal answers with and without overlap, aborts, idling, costs."""

import time
import timeit

import msgspec
import numpy as np
import pytest

from lmjax.config import SchedulerConfig
from lmjax.core.output import StepOutput
from lmjax.core.scheduler import Scheduler
from lmjax.engine.columns import step_record
from lmjax.engine.engine import Engine
from lmjax.engine.records import AbortRequest, AddRequest, Shutdown, StepRecord
from lmjax.types import SamplingParams
from tests.fakes import FakeExecutor, fake_info, run_requests
from tests.fakes import request as new_request


def add(handle, prompt, **params):
    return AddRequest(handle, np.asarray(prompt, "<i4").tobytes(), SamplingParams(**params))


def made(overlap=True, budget=64, executor=None, **info):
    executor = executor or FakeExecutor(fake_info(**info))
    records = []
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=budget), executor.info)
    return Engine(scheduler, executor, records.append, overlap=overlap), records


def answers(records):
    tokens, reasons = {}, {}
    for record in records:
        handles = np.frombuffer(record.handles, "<i8")
        ids = np.frombuffer(record.rows, "<i4").reshape(-1, record.width)[:, 0]
        for handle, token in zip(handles.tolist(), ids.tolist(), strict=True):
            tokens.setdefault(handle, []).append(token)
        reasons |= {end.handle: end.reason for end in record.finished}
    return tokens, reasons


class Inbox:
    """Gives its messages at the given turns; at the end Shutdown, once the engine waits for ever."""

    def __init__(self, messages):
        self.messages, self.turn, self.waits = dict(messages), 0, []

    def __call__(self, timeout):
        self.turn += 1
        self.waits.append(timeout)
        if timeout is None:
            return [Shutdown()] if not self.messages else self.messages.pop(min(self.messages))
        return self.messages.pop(self.turn, [])


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_do_not_depend_on_the_loop(overlap):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, n) for n in (5, 100, 33, 1, 64, 17)]
    engine, records = made(overlap, max_num_seqs=4)
    engine.run(Inbox({2 * i + 1: [add(i, p, max_tokens=9 + i, seed=i)] for i, p in enumerate(prompts)}))
    expected, _ = run_requests(
        [new_request(i, p, max_tokens=9 + i, seed=i) for i, p in enumerate(prompts)],
        SchedulerConfig(max_num_batched_tokens=64),
        fake_info(),
    )
    tokens, reasons = answers(records)
    assert tokens == {handle: answer.token_ids for handle, answer in expected.items()}
    assert set(reasons.values()) == {"length"} and len(reasons) == len(prompts)
    assert not engine.executor.errors


def test_overlap_keeps_two_steps_in_flight():
    for overlap in (False, True):
        engine, _ = made(overlap)
        depths = []
        collect = engine.executor.collect
        engine.executor.collect = lambda f, e=engine, d=depths, c=collect: (d.append(e.executor.in_flight), c(f))[1]
        engine.run(Inbox({1: [add(1, [1, 2], max_tokens=8)]}))
        assert max(depths) == (2 if overlap else 1)


def test_an_abort_frees_the_blocks_within_two_steps():
    engine, records = made()
    for handle in range(4):
        engine.handle(add(handle, range(40), max_tokens=400))
    for _ in range(5):
        engine.step()
    assert engine.stats().num_running == 4 and engine.stats().kv_usage > 0
    engine.handle(AbortRequest([0, 1, 2, 3, 99]))
    engine.step()
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert not engine.busy
    engine.scheduler.check_integrity()
    assert answers(records)[1] == dict.fromkeys(range(4), "abort")


def test_an_idle_engine_sleeps_and_checks_its_books_once():
    engine, records = made()
    checks = []
    engine.scheduler.check_integrity = lambda: checks.append(1)
    inbox = Inbox({1: [add(1, [1], max_tokens=3)], 1000: [add(2, [1], max_tokens=3)]})
    engine.run(inbox)
    assert len(inbox.waits) < 20 and inbox.waits.count(None) == len(checks) == 2
    last = [record.stats for record in records if record.stats is not None][-1]
    assert (last.num_running, last.generation_tokens, last.steps) == (0, 6, engine.stats().steps)


def test_broken_books_end_the_loop():
    engine, _ = made()
    engine.scheduler.check_integrity = lambda: (_ for _ in ()).throw(AssertionError("1 block is lost"))
    with pytest.raises(AssertionError, match="lost"):
        engine.run(Inbox({}))


def test_every_step_size_is_told_once():
    engine, records = made()
    engine.run(Inbox({1: [add(1, range(10), max_tokens=5)], 4: [add(2, range(20), max_tokens=5)]}))
    sizes = [size for r in records if r.stats for size in r.stats.iteration_tokens]
    stats = engine.stats()
    assert len(sizes) == stats.steps and sum(sizes) == stats.scheduled_tokens
    assert 0 < stats.step_host_seconds < 5


def test_waiting_for_the_device_in_submit_is_no_host_time():
    """As CPU meshes do, which run one program at a time."""
    engine, records = made()
    submit, stats, waits = engine.executor.submit, engine.executor.stats, []

    def waiting(plan):
        begin = time.perf_counter()
        time.sleep(0.02)
        waits.append(time.perf_counter() - begin)
        return submit(plan)

    engine.executor.submit = waiting
    engine.executor.stats = lambda: stats() | {"submit_wait_seconds": sum(waits)}
    engine.run(Inbox({1: [add(1, range(10), max_tokens=20)]}))
    told = [record.stats for record in records if record.stats is not None][-1]
    assert len(waits) >= 20 and 0 < told.step_host_seconds < sum(waits) / 2


def busy_engine(rows, step_seconds=0.0, publish=lambda record: None, **params):
    info = fake_info(max_num_seqs=rows, num_blocks=rows * 40, max_model_len=512, token_buckets=(1024,))
    executor = FakeExecutor(info, cheap=True, step_seconds=step_seconds)
    engine, _ = made(executor=executor, budget=1024)
    engine._publish = publish
    for handle in range(rows):
        engine.handle(add(handle, range(4), max_tokens=500, **params))
    for _ in range(5):
        engine.step()
    return engine


def quickest(turn, rounds=10, steps=10):
    """Seconds of the best round: what the machine's other work left alone."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            turn()
        times.append(time.perf_counter() - begin)
    return min(times)


def test_the_host_part_of_a_step_is_small():
    """0.25 ms is the aim for 256 rows on a free core; the bound leaves room for a loaded one."""
    engine = busy_engine(256, publish=msgspec.msgpack.Encoder().encode)
    best = quickest(engine.step, steps=20) / 20
    print(f"host part of a step: {best * 1e3:.3f} ms")
    assert best < 1e-3


def test_steps_take_as_long_as_the_device():
    engine = busy_engine(256, step_seconds=0.005)
    executor = engine.executor
    ((plan, in_flight, _),) = engine._in_flight
    took = quickest(engine.step)
    executor.collect(engine._in_flight[0][1])
    in_flight = executor.submit(plan)

    def bare():
        nonlocal in_flight
        in_flight, before = executor.submit(plan), in_flight
        executor.collect(before)

    ratio = took / quickest(bare)
    print(f"{ratio:.3f} of the bare executor")  # the aim is 1.03; the bound leaves room for a loaded machine
    assert ratio < 1.15


def test_encoding_is_bare_msgspec():
    """A step's record costs little more to make and encode than to encode alone: whole buffers, no row is touched."""
    records = []
    engine = busy_engine(256, publish=records.append, logprobs=5)
    engine.step()
    record, encode = records[-1], msgspec.msgpack.Encoder().encode
    assert isinstance(record, StepRecord) and record.width == 3 + 2 * 5
    assert len(encode(record)) < 256 * (8 + 4 * record.width) + 200
    output = StepOutput(*(getattr(record, name) for name in StepOutput._fields))

    def least(run):
        return min(timeit.repeat(run, number=200, repeat=7))

    ratio = least(lambda: encode(step_record(output))) / least(lambda: encode(record))
    print(f"{ratio:.2f} of bare msgspec")  # the aim is 1.5; the bound leaves room for a loaded machine
    assert ratio < 2.5
