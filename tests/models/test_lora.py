"""Adapters in the decoder, of every way in which families keep their matrices, against merged weights in peft."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.models import decoder
from lmjax.models.lora import abstract_adapters, put_adapter, with_adapters
from lmjax.models.registry import spec_from_hf
from lmjax.weights.lora import read_adapter
from tests import tiny, tiny_loras
from tests.models.driver import COMPILER_OPTIONS, Driver, params_from

RANK, SLOTS = 16, 3


@pytest.fixture(scope="module")
def goldens():
    return np.load(Path(tiny.__file__).parent / "goldens" / "loras.npz")


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2, compiler_options=COMPILER_OPTIONS)
def run(params, spec, pools, batch, adapters):
    params = params.replace(layers=with_adapters(params.layers, adapters))
    hidden, pools = decoder.forward(params, spec, pools, batch)
    return decoder.logits(params, spec, hidden), pools


class AdapterDriver(Driver):
    """``slots``: of each row's adapter."""

    def __init__(self, params, spec, adapters, slots):
        super().__init__(params, spec, tokens=32, rows=2)
        self.adapters, self.slots = adapters, np.array(slots, np.int32)

    def _run(self, batch):
        batch = batch.replace(adapters=self.slots[batch.token_rows])
        return run(self.params, self.spec, self.pools, batch, self.adapters)


@functools.cache
def model(case):
    spec = spec_from_hf(tiny.CASES[case].config, None)
    return params_from(tiny.tensors(case), spec), spec


def slots_with(spec, trees):
    """{slot: an adapter's tree} -> that of all slots. The others hold what would be seen."""
    every = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), abstract_adapters(spec, "float32", SLOTS, RANK))
    for slot in range(SLOTS):
        none = jax.tree.map(lambda x: np.full(x.shape, 7.0, x.dtype), abstract_adapters(spec, "float32", 1, RANK))
        every = put_adapter(every, trees.get(slot, none), jnp.int32(slot))
    return every


@pytest.mark.parametrize("name", tiny_loras.FAMILIES)
def test_an_adapter_gives_what_merged_weights_give(name, goldens, tmp_path):
    """Beside a row of the base model, which is as without adapters."""
    assert str(goldens[f"{name}/checksum"]) == tiny.checksum(tiny_loras.tensors(name))
    case = tiny_loras.ADAPTERS[name].case
    params, spec = model(case)
    found = read_adapter(tiny_loras.write(name, tmp_path), spec, spec, "float32", RANK)
    assert found.rank == tiny_loras.ADAPTERS[name].rank
    prompt, (_, other) = tiny_loras.prompts(name)[0], tiny_loras.prompts("other")
    mixed = AdapterDriver(params, spec, slots_with(spec, {1: found.tree}), [1, -1])
    logits = mixed.step({"own": prompt, "base": other})
    np.testing.assert_allclose(logits["own"][-1], goldens[name], atol=5e-4, rtol=1e-4)
    if name in ("phi3", "some"):  # the others would take as long again
        plain = Driver(params, spec, tokens=32, rows=2).step({"own": prompt, "base": other})
        np.testing.assert_allclose(logits["base"], plain["base"], atol=1e-5)
        assert np.abs(logits["own"] - plain["own"]).max() > 0.1


def test_rows_of_several_adapters_and_what_overflows_in_one(tmp_path):
    """A row's result has nothing of what its neighbours' adapters give, were it infinite."""
    params, spec = model(tiny_loras.MODEL)
    trees = {
        i: read_adapter(tiny_loras.write(f"many{i}", tmp_path / str(i)), spec, spec, "float32", RANK).tree
        for i in range(2)
    }
    first, second = tiny_loras.prompts("other")
    alone = [
        AdapterDriver(params, spec, slots_with(spec, {2: trees[i]}), [2, -1]).step({0: ids})[0]
        for i, ids in enumerate((first, second))
    ]
    together = AdapterDriver(params, spec, slots_with(spec, {0: trees[1], 2: trees[0]}), [2, 0])
    found = together.step({0: first, 1: second})
    for i in range(2):
        np.testing.assert_allclose(found[i], alone[i], atol=1e-5)
    huge = jax.tree.map(lambda x: np.full(x.shape, 3e38, x.dtype), trees[1])
    found = AdapterDriver(params, spec, slots_with(spec, {0: huge, 2: trees[0]}), [2, 0]).step({0: first, 1: second})
    np.testing.assert_allclose(found[0], alone[0], atol=1e-5)
    assert not np.isfinite(found[1]).all()
