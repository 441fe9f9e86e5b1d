"""Cards as data, and that each of them can be compiled for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import NamedSharding, PartitionSpec

from lmjax.config import ConfigError
from lmjax.runtime import cards
from tests import deviceless

NAMES = ("a100-40", "a100-80", "b200", "h100", "h200", "l4", "rtx6000pro")


def test_all_cards_are_there_and_named_as_their_files():
    assert tuple(cards.cards()) == NAMES
    assert all(card.name == name for name, card in cards.cards().items())


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_of_the_right_size(name):
    card = cards.card(name)
    assert 16e9 < card.memory_bytes < 200e9
    assert 0.2e12 < card.memory_bandwidth < 10e12
    assert 1e14 < card.bf16_flops < 3e15
    assert card.target().has_fp8 == (card.fp8_flops is not None)
    assert card.target().capability == card.capability and card.target().cores == card.cores
    assert str(card.memory_bytes) in card.target_config and "{" not in card.target_config.replace(" {", "")


def test_an_unknown_card_is_refused_with_the_names():
    with pytest.raises(ConfigError, match="--device: got 'h300', must be one of a100-40"):
        cards.card("h300")


def test_hosts_are_filled():
    with pytest.raises(ConfigError, match="12 cards do not fill hosts of 8"):
        cards.topology(cards.card("h200"), 12)


def _double(x_ref, o_ref):
    at = jnp.arange(64)
    plt.store(o_ref.at[at], plt.load(x_ref.at[at]) * 2.0)


def _program(x):
    y = pl.pallas_call(
        _double,
        out_shape=jax.ShapeDtypeStruct((64,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
    )(x)
    return x.at[0].add(y[1])


@deviceless.skip
@pytest.mark.parametrize("name", ("a100-80", "b200", "h200", "l4", "rtx6000pro"))  # one a chip
def test_a_program_compiles_for_every_card(name):
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    compiled = deviceless.compile(_program, x, card=name, donate=(0,), dump_ptx=True, kernel="_double")
    assert compiled.memory.alias_size_in_bytes == 256
    assert f".target {cards.card(name).arch}" in compiled.ptx
    if deviceless.PTXAS:
        assert 0 < compiled.registers <= 64 and compiled.spill_bytes == 0


class Device:
    platform, core_count = "gpu", 132

    def __init__(self, kind, capability="9.0"):
        self.device_kind, self.compute_capability = kind, capability


def test_a_real_card_is_known_by_name_capability_and_cores():
    assert cards.card_of(Device("NVIDIA H200")).name == "h200"
    assert cards.card_of(Device("NVIDIA H100 80GB HBM3")).name == "h100"
    assert cards.card_of(Device("NVIDIA H100 PCIe")) is None
    assert cards.card_of(Device("NVIDIA H200", "8.0")) is None
    assert cards.card_of(jax.devices("cpu")[0]) is None


@deviceless.skip
def test_a_mesh_of_cards():
    mesh = deviceless.mesh("a100-80", 4)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "tp")))
    compiled = deviceless.compile(lambda x: x @ x.T, x, card="a100-80", devices=4)
    assert "all-reduce" in compiled.text and compiled.memory.argument_size_in_bytes == 64 * 16 * 4
