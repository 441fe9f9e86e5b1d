"""The engine in its own process: answers, backpressure, refusals, and every way to die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lmjax.config import ConfigError
from lmjax.engine.async_engine import AsyncEngine
from lmjax.types import EngineDeadError, ModelError, ParameterError, QueueFullError, SamplingParams
from tests.engine.factories import config

PROMPT = list(b"What is the answer?")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def start(factory="quick", **changes):
    callbacks = {name: changes.pop(name) for name in ("progress", "on_dead") if name in changes}
    return AsyncEngine.start(config(**changes), executor=f"tests.engine.factories:{factory}", **callbacks)


async def answer(engine, prompt=PROMPT, **params):
    tokens, last = [], None
    async for update in engine.generate(prompt, SamplingParams(**params)):
        last = update
        for delta in update.deltas:
            tokens += delta.token_ids
    return tokens, last


async def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_answers_of_many_at_once_are_those_of_one():
    async def main():
        async with await start(max_num_seqs=8) as engine:
            prompts = [[i, *PROMPT] for i in range(64)]
            alone = [await answer(engine, prompt, max_tokens=12, seed=1) for prompt in prompts[:8]]
            together = await asyncio.gather(*(answer(engine, prompt, max_tokens=12, seed=1) for prompt in prompts))
            assert [tokens for tokens, _ in together[:8]] == [tokens for tokens, _ in alone]
            for tokens, last in together:
                assert len(tokens) == 12 or last.deltas[0].finish_reason == "stop"
                assert last.finished and last.error is None
                times = last.metrics
                assert 0 < times.arrival <= times.scheduled <= times.first_token <= times.last_token
            assert engine.ready and engine.dead is None
            await until(lambda: engine.stats().num_running == 0)
        assert not engine.ready and engine.dead

    run(main())


def test_the_iterator_closed_or_its_reader_cancelled_aborts():
    async def main():
        async with await start("slow") as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
            stream = engine.generate(PROMPT, params)
            await anext(stream)
            reader = asyncio.ensure_future(answer(engine, max_tokens=400, ignore_eos=True))
            never = engine.generate(PROMPT, params)
            await until(lambda: engine.stats().num_running == 3)
            await stream.aclose()
            reader.cancel()
            await never.aclose()
            await until(lambda: engine.stats().num_running == 0, 1.0)
            assert engine.stats().kv_usage == 0
            assert len(engine._outputs) == 0

    run(main())


def test_a_slow_reader_gets_one_merged_update():
    async def main():
        async with await start("slow") as engine:
            stream = engine.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
            first = await anext(stream)
            await asyncio.sleep(0.6)
            rest = [update async for update in stream]
            assert len(rest) == 1 and rest[0].finished
            assert len(first.deltas[0].token_ids) + len(rest[0].deltas[0].token_ids) == 40

    run(main())


def test_a_bad_request_raises_at_the_call():
    async def main():
        async with await start() as engine:
            with pytest.raises(ParameterError, match=r"max_tokens: .*512.*1019.*19.*1000"):
                engine.generate(PROMPT, SamplingParams(max_tokens=1000))
            ids, params = engine.validate(PROMPT, SamplingParams(max_tokens=None, truncate_prompt_tokens=5))
            assert (ids, params.max_tokens) == (PROMPT[-5:], 507)

    run(main())


def test_the_queue_is_full():
    async def main():
        async with await start("slow", max_num_seqs=1, max_num_queued_reqs=1) as engine:
            running = asyncio.ensure_future(answer(engine, max_tokens=100, ignore_eos=True))
            await until(lambda: engine.stats().num_running == 1)
            waiting = asyncio.ensure_future(answer(engine, max_tokens=1))
            await until(lambda: engine.stats().num_waiting == 1)
            with pytest.raises(QueueFullError):
                await answer(engine, max_tokens=1)
            assert len((await running)[0]) == 100 and len((await waiting)[0]) == 1

    run(main())


def test_kill_9_gives_every_client_an_error_and_leaves_nothing():
    async def main():
        told = []
        engine = await start("slow", on_dead=told.append)
        directory = Path(engine._process._directory)
        assert directory.stat().st_mode & 0o777 == 0o700
        seen = []

        async def client():
            try:
                async for update in engine.generate(PROMPT, SamplingParams(max_tokens=450, ignore_eos=True)):
                    seen.append(update)
            except EngineDeadError:
                return "error"

        clients = [asyncio.ensure_future(client()) for _ in range(40)]
        await until(lambda: len(seen) > 40)
        pid, killed = engine.pid, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*clients) == ["error"] * 40
        assert time.monotonic() - killed < 2
        errors = [update for update in seen if update.error]
        assert len(errors) == 40 and all("killed by signal 9" in u.error and u.finished for u in errors)
        assert "signal 9" in engine.dead and not engine.ready and told == [engine.dead]
        with pytest.raises(EngineDeadError):
            await answer(engine, max_tokens=1)
        await engine.close()
        assert not alive(pid) and not directory.exists()

    run(main())


def test_a_failing_loop_says_what_failed():
    async def main():
        engine = await start("fails_later")
        with pytest.raises(EngineDeadError, match=r"RuntimeError: step 20 is bad$"):
            await answer(engine, max_tokens=400, ignore_eos=True)
        pid = engine.pid
        await until(lambda: not alive(pid))
        await engine.close()

    run(main())


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("refuses", ConfigError, "--block-size: got 16, must be$"),
        ("raises", EngineDeadError, "could not start: RuntimeError: the device is on fire$"),
        ("ends", EngineDeadError, "ended with code 7"),
        ("no_such_factory", EngineDeadError, "no_such_factory"),
    ],
)
def test_a_failed_start(factory, kind, message):
    with pytest.raises(kind, match=message):
        run(start(factory))


def test_a_model_that_is_not_there_costs_no_process(monkeypatch):
    monkeypatch.setattr("lmjax.engine.async_engine.EngineProcess", None)
    with pytest.raises(ModelError, match="no such file"):
        run(AsyncEngine.start(config().replace(model="/does/not/exist")))


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_a_cancelled_start_leaves_no_process():
    async def main():
        lines, before = [], children()
        starting = asyncio.ensure_future(start("hangs", progress=lines.append))
        await until(lambda: "hanging" in lines, 20)
        engine = children() - before  # other tests of this process may have left theirs
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert engine and not any(alive(pid) for pid in engine)

    run(main())


def test_signals_to_the_whole_group_leave_the_engine_to_its_parent():
    async def main():
        async with await start("slow") as engine:
            reader = asyncio.ensure_future(answer(engine, max_tokens=50, ignore_eos=True))
            await until(lambda: engine.stats().num_running == 1)
            os.kill(engine.pid, signal.SIGINT)
            os.kill(engine.pid, signal.SIGTERM)
            assert len((await reader)[0]) == 50

    run(main())


SCRIPT = """
    import asyncio, json, sys
    from tests.engine.test_process import PROMPT, answer, start

    async def main():
        engine = await start("slow")
        print(json.dumps([engine.pid, engine._process._directory, sorted(sys.modules)]), flush=True)
        await answer(engine, max_tokens=450, ignore_eos=True)
        await asyncio.sleep(60)

    asyncio.run(main())  # no `if __name__ == "__main__"` is needed
"""


@pytest.fixture
def program():
    """A program with a running engine: its process, the engine's pid and directory, the program's modules."""
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT)], stdout=subprocess.PIPE)
    pid, directory, modules = json.loads(process.stdout.readline())
    yield process, pid, Path(directory), set(modules)
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_parent_takes_the_engine_with_it(program):
    process, pid, directory, _ = program
    assert alive(pid)
    process.kill()
    process.wait()
    run(until(lambda: not alive(pid), 5))
    assert not directory.exists()


def test_the_front_end_stays_small_and_the_engine_without_torch(program):
    """Whether torch is installed or not: it is in neither process."""
    _, pid, _, modules = program
    assert not {"jax", "torch", "transformers"} & modules
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libpython" in maps or "python" in maps
    assert "torch" not in maps
