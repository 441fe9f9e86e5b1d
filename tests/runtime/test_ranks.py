"""What ranks agree on before they run, and calls as bytes."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import msgspec
import numpy as np
import pytest

from lmjax.cluster.messages import Order
from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime import ranks
from lmjax.runtime.buckets import Buckets
from lmjax.runtime.device import Call
from lmjax.runtime.programs import APPLY_PATCHES, LOAD_SLOT
from lmjax.runtime.ranks import CallCodec, check_equal, engine_devices, smallest


class Told:
    """Ranks of whom each says the same as this one but for what is given."""

    def __init__(self, *others: str):
        self.others = others

    def exchange(self, name: str, value: str) -> list[str]:
        return [value, *self.others]


def test_calls_cross_as_they_are():
    buckets = Buckets(4, 16)
    keys = [*buckets.forward, *buckets.sample, LOAD_SLOT, APPLY_PATCHES]
    shapes = [(3,), (5, 2), (1, 4, 2), (6,)]
    rng = np.random.default_rng(0)
    calls = [
        Call(key, rng.integers(-(2**31), 2**31, shapes[i % 4], dtype=np.int64).astype(np.int32))
        for i, key in enumerate(keys)
    ]
    wire = msgspec.msgpack.encode(CallCodec(keys).encode(7, calls))
    step = msgspec.msgpack.Decoder(Order).decode(wire)
    found = CallCodec(keys).decode(step)
    assert step.number == 7 and [call.key for call in found] == [call.key for call in calls]
    for call, same in zip(calls, found, strict=True):
        assert same.packed.dtype == np.int32 and same.packed.ctypes.data % 64 == 0
        np.testing.assert_array_equal(call.packed, same.packed)


def test_a_key_that_the_others_do_not_have_is_an_error():
    with pytest.raises(KeyError):
        CallCodec([LOAD_SLOT]).encode(1, [Call("swap", np.zeros(1, np.int32))])


def test_the_first_difference_is_named():
    facts = {"jax": "1", "--dtype": "float32"}
    check_equal(Told('{"jax": "1", "--dtype": "float32"}'), facts)
    with pytest.raises(ConfigError, match=r"^--dtype: float32 on rank 0, bfloat16 on rank 2$"):
        check_equal(Told('{"jax": "1", "--dtype": "float32"}', '{"jax": "1", "--dtype": "bfloat16"}'), facts)
    with pytest.raises(ConfigError, match=r"^plugin: not there on rank 0, x on rank 1$"):
        check_equal(Told('{"jax": "1", "--dtype": "float32", "plugin": "x"}'), facts)


def test_the_rank_with_the_least_room_decides():
    assert smallest(Told("[7, 9]", "[8, 5]"), "blocks", (8, 6)) == (7, 5)


def test_each_host_gives_equally_many_devices(monkeypatch):
    devices = [SimpleNamespace(process_index=rank, id=n) for rank, n in ((0, 0), (0, 1), (0, 2), (1, 8), (1, 9))]
    monkeypatch.setattr(ranks.jax, "devices", lambda: devices)
    hosts = {"nnodes": 2, "node_rank": 0, "master_addr": "a"}
    assert [d.id for d in engine_devices(EngineConfig(tensor_parallel_size=4, **hosts))] == [0, 1, 8, 9]
    with pytest.raises(ConfigError, match="got 6, which is 3 devices on each of 2 hosts, but rank 1 has 2"):
        engine_devices(EngineConfig(tensor_parallel_size=6, **hosts))
    assert jax.devices() is devices
