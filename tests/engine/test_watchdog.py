"""A step that never ends takes the engine down with a message, and nothing else does."""

import asyncio
import threading
import time

import pytest

from lmjax.config import ConfigError, EngineConfig
from lmjax.engine.watchdog import CPU_TIMEOUT, GPU_TIMEOUT, Watchdog, step_timeout
from lmjax.types import EngineDeadError, SamplingParams
from tests.engine.test_process import PROMPT, alive, run, start


def test_a_hung_step_ends_the_engine_and_the_request_is_told():
    async def main():
        engine = await start("hangs_later", step_timeout=1.0)
        pid = engine._process.pid
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"has not finished for 1 s .--step-timeout.*hangs"):
            async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True)):
                pass
        assert time.monotonic() - began < 10
        assert not engine.ready and "has not finished" in engine.dead
        while alive(pid):
            await asyncio.sleep(0.05)
        await engine.close()

    run(main())


def test_quick_steps_and_an_idle_engine_are_left_alone():
    messages = []
    dog = Watchdog(0.3, messages.append)
    step = dog.watched(lambda: time.sleep(0.05) or True)
    for _ in range(10):
        assert step() is True
    time.sleep(0.5)
    dog.stop()
    assert messages == []


def test_a_long_step_is_told_once():
    messages, called = [], threading.Event()
    dog = Watchdog(0.2, lambda message: (messages.append(message), called.set()))
    dog.watched(lambda: called.wait(5))()
    dog.stop()
    assert len(messages) == 1 and messages[0].startswith("step 1 has not finished for 0.2 s")


def test_how_long():
    assert (step_timeout(None, "gpu"), step_timeout(None, "cpu")) == (GPU_TIMEOUT, CPU_TIMEOUT)
    assert step_timeout(0, "gpu") == 0 and step_timeout(5.0, "cpu") == 5.0
    with pytest.raises(ConfigError, match="--step-timeout: got -1"):
        EngineConfig(step_timeout=-1).validate()
