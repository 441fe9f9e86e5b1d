"""Adapters through the channel: in one engine's process and in several, on the fake executor, whose tokens depend on
the adapter's number."""

import asyncio
import os
import shutil
import signal
from types import SimpleNamespace

import pytest

from lmjax.config import ConfigError
from lmjax.engine import replicas as module
from lmjax.engine.lora_names import check_new_lora, find_lora
from lmjax.engine.replicas import Replicas
from lmjax.engine.routing import block_names
from lmjax.types import AdapterError, EngineDeadError, LoraInfo, OrderError, SamplingParams
from tests.engine.factories import config
from tests.engine.test_process import PROMPT, run, start, until

FACTORY = "with_adapters"


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b", "slow", "only0", "bug"):
        (tmp_path / name).mkdir()
    return tmp_path


async def tokens(engine, lora, count=12, prompt=PROMPT):
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    stream = engine.generate(prompt, params, lora=lora)
    return [token async for update in stream for delta in update.deltas for token in delta.token_ids]


def test_requests_name_adapters_that_come_and_go(folder):
    async def main():
        async with await start(FACTORY, enable_lora=True, lora_modules={"a": str(folder / "a")}) as engine:
            assert engine.loras == {"a": LoraInfo("a", str(folder / "a"), 4)} and engine.info.max_loras == 8
            await engine.load_lora("b", str(folder / "b"))
            alone = [await tokens(engine, lora) for lora in (None, "a", "b")]
            assert len(set(map(tuple, alone))) == 3
            together = await asyncio.gather(*(tokens(engine, lora) for lora in (None, "a", "b") * 4))
            assert together == alone * 4
            running = [asyncio.ensure_future(tokens(engine, "b", 100)) for _ in range(20)]  # four of them wait
            await until(lambda: engine.stats().running_loras == ["b"] == engine.stats().waiting_loras)
            unused = engine.generate(PROMPT, SamplingParams(), lora="b")
            await engine.unload_lora("b")
            assert set(engine.loras) == {"a"}
            with pytest.raises(AdapterError, match="lora: there is no adapter 'b'") as error:
                engine.generate(PROMPT, SamplingParams(), lora="b")
            assert error.value.unknown
            with pytest.raises(AdapterError, match="there is no adapter 'b'"):
                await anext(unused)
            await engine.load_lora("b", str(folder / "a"))  # another of that name, while the old one answers
            assert (await tokens(engine, "b")) not in alone
            found = await asyncio.gather(*running)
            assert all(one == found[0] and len(one) == 100 and one[:12] == alone[2] for one in found)
            assert engine.stats().running_loras == engine.stats().waiting_loras == [] and not engine._with_lora

    run(main())


def test_what_cannot_be_loaded_changes_nothing(folder):
    async def main():
        settings = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
        async with await start(FACTORY, lora_modules={"a": str(folder / "a")}, **settings) as engine:
            before, said = dict(engine.loras), await tokens(engine, "a")
            for name, path, message, field in (
                ("a", "b", "the name 'a' is taken by the adapter in .*a; unload that first", "name"),
                ("", "b", "got the name ''", "name"),
                (3, "b", "got the name 3", "name"),
                ("x" * 257, "b", "must be 1 to 256", "name"),
                ("x", "nope", "nope: is no directory", "path"),
            ):
                with pytest.raises(AdapterError, match=message) as error:
                    await engine.load_lora(name, str(folder / path))
                assert error.value.field == field
            with pytest.raises(AdapterError, match="got the path None"):
                await engine.load_lora("x", None)
            with pytest.raises(OrderError, match="ZeroDivisionError: deep inside") as error:
                await engine.load_lora("x", str(folder / "bug"))
            assert error.value.internal
            for unknown in ("x", "", None):
                with pytest.raises(AdapterError, match="there is no adapter"):
                    await engine.unload_lora(unknown)
            assert engine.loras == before and await tokens(engine, "a") == said
            # of two at once that want the same name one gets it
            load = [engine.load_lora("b", str(folder / path)) for path in ("b", "slow")]
            results = await asyncio.gather(*load, return_exceptions=True)
            assert results[0] is None and isinstance(results[1], AdapterError)
            await engine.load_lora("c", str(folder / "b"))
            with pytest.raises(AdapterError, match="--max-cpu-loras"):
                await engine.load_lora("d", str(folder / "b"))
            assert set(engine.loras) == {"a", "b", "c"} and engine.ready

    run(main())


def test_others_go_on_while_files_are_read_and_a_client_that_goes_stops_nothing(folder):
    async def main():
        async with await start(FACTORY, enable_lora=True) as engine:
            loading = asyncio.ensure_future(engine.load_lora("x", str(folder / "slow")))
            await asyncio.sleep(0.1)
            for _ in range(5):
                assert len(await tokens(engine, None, 5)) == 5
            assert not loading.done() and "x" not in engine.loras
            loading.cancel()
            await until(lambda: "x" in engine.loras)
            assert len(await tokens(engine, "x", 5)) == 5

    run(main())


def test_without_the_flag_there_are_none():
    info = SimpleNamespace(max_loras=0)
    find_lora(None, {}, info)
    for call in (lambda: check_new_lora("x", "y", {}, info), lambda: find_lora("x", {}, info)):
        with pytest.raises(AdapterError, match="started without --enable-lora"):
            call()


def test_a_start_with_a_bad_adapter_is_refused(folder):
    with pytest.raises(ConfigError, match=r"--lora-modules: x: .*nope: is no directory"):
        run(start(FACTORY, enable_lora=True, lora_modules={"x": str(folder / "nope")}))


def start_many(count=2, **changes):
    settings = config(enable_lora=True, **changes)
    return Replicas.start(settings, count, executor=f"tests.engine.factories:{FACTORY}")


def test_all_engines_have_the_same_adapters(folder, monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY", 0.05)

    async def main():
        async with await start_many(lora_modules={"a": str(folder / "a"), "b": str(folder / "b")}) as many:
            assert set(many.loras) == {"a", "b"}
            with pytest.raises(AdapterError, match="not for this one"):  # so the other one gives it back
                await many.load_lora("x", str(folder / "only0"))
            assert all(set(engine.loras) == {"a", "b"} for engine in many._engines.values())
            with pytest.raises(AdapterError, match="is no directory"):
                await many.load_lora("x", str(folder / "nope"))
            with pytest.raises(AdapterError, match="is taken"):
                await many.load_lora("a", str(folder / "b"))
            await many.load_lora("c", str(folder / "a"))
            await many.load_lora("d", str(folder / "b"))
            await many.unload_lora("a")
            with pytest.raises(AdapterError, match="there is no adapter 'a'"):
                many.generate(PROMPT, SamplingParams(), lora="a")
            with pytest.raises(AdapterError, match="there is no adapter 'a'"):
                await many.unload_lora("a")
            running = [asyncio.ensure_future(tokens(many, lora, 60, [i, *PROMPT])) for i, lora in enumerate("bcd" * 4)]
            await until(lambda: many.stats().running_loras == ["b", "c", "d"])
            assert [len(one) for one in await asyncio.gather(*running)] == [60] * 12
            # an engine that is started anew has what the others have, and goes without what cannot be read any more
            shutil.rmtree(folder / "b")
            os.kill(many.pids[1], signal.SIGKILL)
            await until(lambda: len(many.pids) == 1)
            await until(lambda: len(many.pids) == 2, 20)
            assert [set(many._engines[i].loras) for i in range(2)] == [{"b", "c", "d"}, {"c"}]
            many._replicas[0].work += 10**6  # the other one would get them
            assert await asyncio.gather(*(tokens(many, lora) for lora in ("b", "d"))) == [
                await tokens(many._engines[0], lora) for lora in ("b", "d")
            ]
            for i in range(2):
                many._replicas[i].work = 0
            await many.unload_lora("d")
            assert set(many.loras) == {"b", "c"}
            os.kill(many.pids[0], signal.SIGKILL)  # now nobody has b
            await until(lambda: len(many.pids) == 1)
            await until(lambda: len(many.pids) == 2, 20)
            assert len(await tokens(many, "c")) == 12
            with pytest.raises(EngineDeadError, match="no engine that is alive has the adapter 'b'"):
                await tokens(many, "b")

    run(main())


def test_prefixes_of_adapters_are_apart():
    ids = list(range(65))
    names = {tuple(block_names(ids, salt, 16, lora)) for salt in (None, "a", "b") for lora in (None, "a", "b")}
    assert len(names) == 9
