import logging
import stat
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime import platform
from lmjax.runtime.compiler import CompileAfterReadyError, CompileMonitor, Program, compile_all


def new_function(salt: int):
    """One that no cache knows."""
    return jax.jit(lambda x: x * jnp.float32(salt) + jnp.float32(np.random.default_rng().random()))


def test_all_programs_are_compiled_and_donate():
    array = jax.ShapeDtypeStruct((4,), jnp.float32)
    programs = {
        i: Program(f"add{i}", lambda x, y, i=i: (x + jnp.float32(i), y), (array, array), (0,)) for i in range(5)
    }
    told = []
    done = compile_all(programs, told.append)
    assert sorted(done) == list(range(5))
    assert [line.split()[2] for line in told] == [f"{i}/5" for i in range(1, 6)]
    x = jnp.zeros(4, jnp.float32)
    out, _ = done[3](x, np.ones(4, np.float32))
    assert np.asarray(out).tolist() == [3.0] * 4
    assert x.is_deleted()


def test_a_failing_program_fails_the_start():
    def broken(x):
        raise ZeroDivisionError

    array = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(ZeroDivisionError):
        compile_all({i: Program("broken", broken, (array,)) for i in range(3)}, None)


def test_a_compile_while_watching_is_counted_and_logged(caplog):
    monitor = CompileMonitor()
    function = new_function(3)
    with caplog.at_level(logging.ERROR), monitor.watch():
        function(np.ones(3, np.float32))
    assert monitor.count >= 1
    assert "after the engine was ready" in caplog.text
    before = monitor.count
    with monitor.watch():
        function(np.ones(3, np.float32))
    assert monitor.count == before


def test_an_eager_operation_of_a_new_shape_counts():
    monitor = CompileMonitor()
    x = jax.device_put(np.ones(1237, np.float32))
    with monitor.watch():
        x + x
    assert monitor.count >= 1


def test_other_threads_and_other_times_do_not_count():
    monitor = CompileMonitor()
    new_function(4)(np.ones(3, np.float32))
    with monitor.watch():
        thread = threading.Thread(target=lambda: new_function(5)(np.ones(3, np.float32)))
        thread.start()
        thread.join()
    assert monitor.count == 0


def test_require_warm_raises():
    monitor = CompileMonitor(require_warm=True)
    function = new_function(6)
    with pytest.raises(CompileAfterReadyError, match="--require-warm"), monitor.watch():
        function(np.ones(3, np.float32))
    with monitor.watch():
        function(np.ones(3, np.float32))


def test_cache_directory_is_private(tmp_path, caplog):
    path = tmp_path / "a" / "b"
    platform.make_private_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    platform.make_private_dir(path)
    assert not caplog.records
    path.chmod(0o770)
    platform.make_private_dir(path)
    assert "others may write" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o770, "a directory that was there keeps its mode"
    path.chmod(0o777)
    with pytest.raises(ConfigError, match="anybody may write"):
        platform.make_private_dir(path)


def test_cache_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--compilation-cache-dir: cannot use"):
        platform.make_private_dir(tmp_path / "file" / "x")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("LMJAX_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    found = platform.compilation_cache_dir(EngineConfig())
    assert found.is_relative_to(tmp_path) and jax.__version__ in found.name
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert str(platform.compilation_cache_dir(EngineConfig())) == "/somewhere"
    chosen = EngineConfig(compilation_cache_dir="/chosen")
    assert str(platform.compilation_cache_dir(chosen)) == "/chosen"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("LMJAX_CACHE")
    assert ".cache/lmjax" in str(platform.compilation_cache_dir(EngineConfig()))


@pytest.mark.parametrize("card", [False, True])
def test_an_unused_nvidia_card_is_a_loud_warning(card, monkeypatch, caplog):
    monkeypatch.setattr(platform, "nvidia_card_present", lambda: card)
    with caplog.at_level(logging.INFO):
        name, count = platform.describe_platform()
    assert (name, count) == ("cpu", jax.device_count())
    assert "running on cpu" in caplog.text
    assert ("NVIDIA card" in caplog.text) == card
