"""Several engines behind one client: who gets a request, the same answers, and one that dies."""

import asyncio
import os
import signal

import pytest

from lmjax.config import ConfigError, EngineConfig
from lmjax.engine import replicas as module
from lmjax.engine.replicas import Replicas
from lmjax.engine.routing import Replica, block_names, by_cost
from lmjax.types import EngineDeadError, QueueFullError
from tests.engine.factories import config
from tests.engine.test_process import PROMPT, answer, run, start, until
from tests.fixtures import model_dir


def start_many(count=2, factory="quick", **changes):
    return Replicas.start(config(**changes), count, executor=f"tests.engine.factories:{factory}")


def test_the_least_loaded_unless_another_has_the_prefix():
    pair = {0: Replica(100), 1: Replica(100)}
    names = block_names(list(range(65)), None, 16)
    assert len(names) == 4
    assert by_cost(pair, names, 65, 16) == [(0, 65), (1, 65)]
    pair[0].work = 1
    assert by_cost(pair, names, 65, 16)[0] == (1, 65)
    pair[0].note(names)
    assert by_cost(pair, names, 65, 16) == [(0, 1), (1, 65)]
    pair[0].work = 65  # its queue costs more than the prefix saves
    assert by_cost(pair, names, 65, 16)[0] == (1, 65)
    assert block_names(list(range(65)), "salt", 16) != names
    pair[0].forget()
    assert pair[0].num_cached(names) == 0


def test_the_oldest_prefix_is_forgotten_first():
    replica = Replica(4)
    a, b = block_names(list(range(49)), None, 16), block_names(list(range(100, 133)), None, 16)
    replica.note(a)
    replica.note(b)
    assert (replica.num_cached(a), replica.num_cached(b)) == (0, 2)


def test_answers_are_those_of_one_engine():
    async def main():
        async with await start() as one, await start_many(3) as many:
            prompts = [[i, *PROMPT] for i in range(30)]
            alone = [await answer(one, prompt, max_tokens=12, seed=1) for prompt in prompts]
            together = await asyncio.gather(*(answer(many, prompt, max_tokens=12, seed=1) for prompt in prompts))
            assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
            await until(lambda: many.stats().num_running == 0)
            await until(lambda: many.stats().prompt_tokens == sum(map(len, prompts)))
            assert all(replica.work == 0 for replica in many._replicas.values())
            shares = [engine.stats().prompt_tokens for engine in many._engines.values()]
            assert min(shares) >= sum(shares) / 6, shares

    run(main())


@pytest.mark.slow  # three starts with real programs
def test_two_engines_of_four_devices_answer_as_one_device():
    """Two stages of two devices each, twice."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128, "num_gpu_blocks_override": 40}
    one = EngineConfig(model=str(model_dir("RAND")), **settings)
    four = one.replace(tensor_parallel_size=2, pipeline_parallel_size=2)

    async def answers(config, count):
        async with await Replicas.start(config, count) as many:
            prompts = [[10 + i, *range(20, 30 + i)] for i in range(8)]
            found = await asyncio.gather(*(answer(many, p, max_tokens=12, seed=1, temperature=1.0) for p in prompts))
            assert len(many._engines) == count
            return [tokens for tokens, _ in found]

    assert run(answers(four, 2)) == run(answers(one, 1))


def test_equal_prefixes_go_where_they_are():
    async def main():
        async with await start_many(2, block_size=16) as many:
            shared = [[*PROMPT * 6], [*reversed(PROMPT * 6)]]
            for _ in range(4):
                for prompt in shared:
                    await answer(many, prompt, max_tokens=2)
            await until(lambda: many.stats().prefix_queries == 8 * len(shared[0]))
            whole = len(shared[0]) // 16 * 16
            assert many.stats().prefix_hits >= 6 * (whole - 16)

    run(main())


def test_one_that_dies_takes_only_its_own_requests(monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY", 0.05)

    async def main():
        async with await start_many(2, "slow") as many:
            pids = many.pids
            running = [
                asyncio.ensure_future(answer(many, [i, *PROMPT], max_tokens=200, ignore_eos=True)) for i in range(8)
            ]
            await until(lambda: many.stats().num_running == 8)
            before = many.stats().prompt_tokens
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: [report.alive for report in many.reports().values()] == [False, True])
            counted = many.reports()[0].stats
            assert counted.prompt_tokens > 0 and counted.num_running == 0
            found = await asyncio.gather(*running, return_exceptions=True)
            dead = [x for x in found if isinstance(x, EngineDeadError)]
            assert len(dead) == 4, found
            assert all(error.retry_after == 1 for error in dead)  # the other engine is alive
            assert all(len(x[0]) == 200 for x in found if not isinstance(x, EngineDeadError))
            assert many.ready and many.dead is None
            await until(lambda: set(many.pids) == {0, 1}, 20)
            assert many.pids[1] == pids[1] and many.pids[0] != pids[0]
            assert many.stats().prompt_tokens >= before
            again = many.reports()[0]
            assert again.alive and again.stats.prompt_tokens >= counted.prompt_tokens
            assert all(replica.work == 0 for replica in many._replicas.values())
            tokens, _ = await answer(many, max_tokens=5, ignore_eos=True)
            assert len(tokens) == 5

    run(main())


def test_none_is_left_and_none_can_be_started(monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(module, "MOST_FAILURES", 2)

    async def main():
        async with await start_many(2) as many:
            many._executor = "tests.engine.factories:refuses"
            for pid in list(many.pids.values()):
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not many.ready)
            with pytest.raises(EngineDeadError) as found:
                await answer(many, max_tokens=5)
            assert found.value.retry_after == 5
            await until(lambda: many.dead is not None, 20)
            assert "--block-size" in many.dead

    run(main())


def test_a_full_queue_sends_on_to_the_next():
    async def main():
        limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
        async with await start_many(2, "slow", **limits) as many:
            params = {"max_tokens": 300, "ignore_eos": True}
            running = []

            async def send(count, first):
                """To the engine ``first``, as far as the router knows."""
                many._replicas[first].work -= 10**6
                running.extend(asyncio.ensure_future(answer(many, [i, *PROMPT], **params)) for i in range(count))
                await asyncio.sleep(0.3)
                many._replicas[first].work += 10**6

            await send(3, 0)
            await until(lambda: [e._stats.num_running for e in many._engines.values()] == [1, 1])
            await send(1, 0)
            many._replicas[0].work -= 10**6
            with pytest.raises(QueueFullError):  # both are full
                await answer(many, **params)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    run(main())


def test_lines_of_the_log_say_whose_they_are(capfd, caplog):
    caplog.set_level("INFO", "lmjax")

    async def main():
        async with await start_many(2, "says") as many:
            os.kill(many.pids[1], signal.SIGKILL)
            await until(lambda: len(many.pids) == 1)

    run(main())
    written, logged = capfd.readouterr().err, [record.getMessage() for record in caplog.records]
    for index in range(2):
        assert f" WARNING engine {index}: lmjax.runtime: is being made\n" in written
        assert f"engine {index}: building a fake" in logged
    assert "engine 1: the engine process was killed by signal 9" in logged


def test_a_start_that_fails_leaves_nothing():
    async def main():
        with pytest.raises(ConfigError, match="--block-size"):
            await start_many(2, "refuses")

    run(main())


def test_each_has_its_own_cards(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert module._devices_of(1, 2, 2) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert module._devices_of(2, 3, 1) == {"CUDA_VISIBLE_DEVICES": "6"}
    with pytest.raises(ConfigError, match="need 4, CUDA_VISIBLE_DEVICES names 3"):
        module._devices_of(1, 2, 2)
