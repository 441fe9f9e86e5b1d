"""Weights and sleep through the loop, its process and its replicas, on a device without a model."""

import asyncio
import os
import signal

import msgspec
import numpy as np
import pytest

from lmjax.config import SchedulerConfig
from lmjax.core.scheduler import Scheduler
from lmjax.engine import replicas as module
from lmjax.engine.engine import Engine
from lmjax.engine.output import OutputProcessor
from lmjax.engine.records import (
    ControlReply,
    Inbound,
    LoadWeights,
    Outbound,
    Sleep,
    StepRecord,
    WakeUp,
)
from lmjax.types import EngineDeadError, OrderError, SamplingParams
from tests.engine.test_engine import Inbox, add, answers
from tests.engine.test_process import PROMPT, answer, run, start, until
from tests.engine.test_replicas import start_many
from tests.fake_engine import byte_tokenizer
from tests.fake_pipeline import FakePipeline
from tests.fakes import FakeExecutor, fake_info


def made(overlap=True, stages=1):
    info = fake_info(stages=stages)
    told = []
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=64), info)
    engine = Engine(scheduler, FakePipeline(info) if stages > 1 else FakeExecutor(info), told.append, overlap=overlap)
    return engine, told


def replies(told):
    return [message for message in told if isinstance(message, ControlReply)]


def records(told):
    return [message for message in told if isinstance(message, StepRecord)]


def versions(told):
    """By handle, the version of each of its tokens."""
    found = {}
    for record in records(told):
        for handle in np.frombuffer(record.handles, "<i8").tolist():
            found.setdefault(handle, []).append(record.version)
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_orders_are_carried_out_in_turn_while_requests_go_on(overlap):
    engine, told = made(overlap)
    asked = [add(1, range(20), max_tokens=40)]
    orders = {6: [LoadWeights(1, "7", "seven"), LoadWeights(2, "nine"), LoadWeights(3, "5", 3, "recompute")]}
    engine.run(Inbox({1: asked, **orders}))
    first, second, third = replies(told)
    assert (first.id, first.version, first.error) == (1, "seven", None)
    assert second.version == "seven" and "no number follows" in second.error and not second.internal
    assert (third.id, third.version, third.error) == (3, 3, None)
    [found] = versions(told).values()
    assert len(found) == 40 and list(dict.fromkeys(found)) == [0, "seven", 3]
    assert engine.executor.weights == 5 and answers(records(told))[1] == {1: "length"}
    assert not engine.executor.errors


def test_what_cannot_be_loaded_leaves_everything_as_it_was():
    engine, told = made()
    orders = [LoadWeights(1, "bad"), LoadWeights(2, "5", None, "drop"), Sleep(3, 5), LoadWeights(4, "6", "")]
    engine.run(Inbox({1: [add(1, range(9), max_tokens=12)], 4: orders}))
    errors = [reply.error for reply in replies(told)]
    for error, said in zip(
        errors, ("bad: no such file", "kv_cache: got 'drop'", "level: got 5", "version"), strict=True
    ):
        assert said in error
    assert versions(told) == {1: [0] * 12} and engine.live.version == 0 and not engine.live.level


def test_a_failure_of_the_device_is_told_as_one():
    engine, told = made()

    def failing(path):
        loading = FakeExecutor.start_loading(engine.executor, path)
        loading.error = RuntimeError("RESOURCE_EXHAUSTED: no memory")
        return loading

    engine.executor.start_loading = failing
    engine.run(Inbox({1: [LoadWeights(1, "7")]}))
    [reply] = replies(told)
    assert reply.internal and reply.error == "RuntimeError: RESOURCE_EXHAUSTED: no memory"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_sleep_and_wake_in_the_middle(level, overlap):
    plain, told = made(overlap)
    asked = [add(i, range(i, 30), max_tokens=30, seed=i) for i in range(4)]
    plain.run(Inbox({1: asked}))
    expected = answers(records(told))
    engine, told = made(overlap)
    inbox = Inbox({1: asked, 9: [Sleep(1, level)]})
    asleep = []

    def receive(timeout):
        if engine.live.level and timeout is None:  # it waits for ever: nothing to do until it is woken
            asleep.append(engine.executor.steps)
            return [add(9, range(5), max_tokens=3)] if len(asleep) == 1 else [WakeUp(2)]
        return inbox(timeout)

    engine.run(receive)
    assert len(asleep) == 2 and asleep[0] == asleep[1]
    tokens, reasons = answers(records(told))
    assert tokens.pop(9) and reasons.pop(9) == "length"
    assert (tokens, reasons) == expected and not engine.executor.errors
    assert [(reply.id, reply.level, reply.error) for reply in replies(told)] == [(1, level, None), (2, 0, None)]


def test_an_abort_is_told_while_it_sleeps():
    engine, told = made()
    engine.handle(add(1, range(30), max_tokens=200))
    for _ in range(5):
        engine.step()
    engine.handle(Sleep(1, 1))
    engine.step()
    assert engine.live.level == 1 and not engine.busy
    engine.scheduler.abort([1])
    engine.step()
    assert records(told)[-1].finished[0].reason == "abort" and not engine.scheduler.has_work()


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_is_empty_when_the_weights_change(stages):
    engine, told = made(stages=stages)
    pipeline = engine.executor
    pipeline.set_params = lambda weights: setattr(pipeline, "weights", weights)
    for handle in range(6):
        engine.handle(add(handle, range(handle, 40), max_tokens=30))
    held = []
    for turn in range(60):
        if turn in (15, 30):
            held.append(sum(step.plan.num_rows > 0 for step in list(pipeline.steps)[: stages - 1]))
            engine.live.set_params(turn, None, "keep")
        engine.step()
    while engine.busy:
        engine.step()
    assert sum(held) > 0 and pipeline.held_at_a_change == 0 and not pipeline.errors
    found = versions(told)
    assert len(found) == 6 and all(len(v) == 30 and v == sorted(v) for v in found.values())
    assert {version for v in found.values() for version in v} == {0, 1, 2}


def test_a_record_gives_its_version_to_every_token():
    outputs = OutputProcessor(byte_tokenizer(), ())
    request = outputs.open("a", [97], SamplingParams(max_tokens=9), 0.0)
    for version, ids in (("a", [98]), (3, [99])):
        rows = np.array(ids, "<i4").tobytes()
        outputs.process(StepRecord(np.array([request.handle] * len(ids), "<i8").tobytes(), 1, rows, version=version))
    assert request.take().deltas[0].weight_versions == ["a", 3]


def test_orders_cross_the_channel():
    encode = msgspec.msgpack.encode
    for order in (LoadWeights(1, "/x", "v"), LoadWeights(2, "/x", 3, "recompute"), Sleep(3, 2), WakeUp(4)):
        assert msgspec.msgpack.decode(encode(order), type=Inbound) == order
    for message in (ControlReply(1, "v", 2, 0.5, "no", True), StepRecord(version="v"), StepRecord(version=4)):
        assert msgspec.msgpack.decode(encode(message), type=Outbound) == message


def test_in_a_process():
    async def main():
        async with await start("slow") as engine:
            running = asyncio.ensure_future(answer(engine, PROMPT, max_tokens=100))
            await until(lambda: engine.stats().generation_tokens > 5)
            await engine.load_weights("4", "four")
            assert engine.weight_version == "four"
            with pytest.raises(OrderError, match="bad: no such file"):
                await engine.load_weights("bad", 1)
            await engine.sleep(2)
            assert engine.sleep_level == 2 and not running.done()
            waiting = asyncio.ensure_future(answer(engine, PROMPT, max_tokens=5))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await engine.wake_up()
            assert len((await running)[0]) == 100 and len((await waiting)[0]) == 5
            assert (engine.sleep_level, engine.weight_version) == (0, "four")
            asleep = asyncio.ensure_future(engine.load_weights("5", 5))
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await asleep
            with pytest.raises(EngineDeadError):
                await engine.sleep()

    run(main())


async def greedy(engine):
    return (await answer(engine, PROMPT, max_tokens=8, temperature=0.0))[0]


def test_all_replicas_change_and_a_new_one_catches_up(monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY", 0.05)

    async def main():
        async with await start_many(2) as many:
            before = await greedy(many)
            await many.load_weights("3")
            assert many.weight_version == 1
            assert [engine.weight_version for engine in many._engines.values()] == [1, 1]
            expected = [await greedy(engine) for engine in many._engines.values()]
            assert expected[0] == expected[1] != before
            with pytest.raises(OrderError):
                await many.load_weights("bad")
            assert many.weight_version == 1
            os.kill(many.pids[0], signal.SIGKILL)
            await until(lambda: 0 not in many.pids)
            await many.load_weights("6", "six")  # while it is away
            await until(lambda: 0 in many.pids, 60)
            assert [engine.weight_version for engine in many._engines.values()] == ["six", "six"]
            found = [await greedy(engine) for engine in many._engines.values()]
            assert found[0] == found[1] not in (before, expected[0])
            await many.sleep(2)
            assert many.sleep_level == 2 and all(engine.sleep_level == 2 for engine in many._engines.values())
            await many.wake_up()
            assert await greedy(many) == found[0]

    run(main())


def test_a_replica_that_differs_is_started_anew(monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY", 0.05)

    async def main():
        async with await start_many(2) as many:
            second, pid = many._engines[1], many.pids[1]

            async def failing(*_):
                raise OrderError("its disk is full")

            second.load_weights = failing
            await many.load_weights("3", "three")
            await until(lambda: many.pids.get(1) not in (None, pid), 60)
            assert many._engines[1].weight_version == "three"
            assert many.dead is None

    run(main())
