"""Every program of benchmarks/gpu.py at its full size, compiled for cards that aren't there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu_parts import attention, check, llama, matmuls, model, session, step, sweep
from lmjax.models.registry import spec_from_hf
from lmjax.runtime import cards
from lmjax.runtime.programs import forward_program
from tests import deviceless

pytestmark = [deviceless.skip, pytest.mark.timeout(3600)]
CARDS = ["h200", "a100-80", "b200"]
HELD = 2**20  # elements above which an array is only a shape


class Uncompiled:
    def __init__(self, function: Any, *args: Any, card: str):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        # traced now, like the real one: a tile on trial is gone later
        self.compile = lambda compiler_options=None: deviceless.compile(traced.jaxpr_call, *shapes, card=card)
        traced = Traced(function, shapes)


class Traced:
    def __init__(self, function: Any, shapes: Any):
        closed, self.out = jax.make_jaxpr(function, return_shape=True)(*shapes)
        self.jaxpr_call = lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args))


@pytest.fixture
def dry(monkeypatch):
    """A session on a card that isn't there: programs are compiled and not run."""

    def randoms(shape: tuple[int, ...], dtype: Any, seed: int = 0, scale: float = 1.0) -> Any:
        small = jnp.prod(jnp.array(shape)) < HELD
        return made(shape, dtype, seed, scale) if small else jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def start(card: str) -> session.Session:
        for module in (attention, check, matmuls, model, sweep):
            for name, fake in fakes.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fake(card))
        monkeypatch.setattr(session.Session, "race", lambda self, calls: dict.fromkeys(calls, 1e-3))
        monkeypatch.setattr(session.Session, "seconds", lambda self, call: 1e-3)
        s = session.Session(cards.card(card).target(), False, 10**11, {"copy": 1e12, "bfloat16": 1e14})
        s.deadline = float("inf")
        return s

    made = session.randoms
    fakes = {
        "randoms": lambda card: randoms,
        "lower": lambda card: lambda f, *args: Uncompiled(f, *args, card=card),
        "compiled": lambda card: lambda f, *args: Uncompiled(f, *args, card=card).compile(),
        "bind": lambda card: lambda executable, *args: lambda: None,
        "difference": lambda card: lambda a, b: 0.0,
    }
    return start


class Unrun:
    """check calls its executables itself."""

    def __init__(self, compiled: Any):
        self.compiled = compiled

    def __call__(self, *args: Any) -> None:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("section", ["check", "decode", "prefill", "quant", "grouped", "sweep"])
@pytest.mark.parametrize("card", CARDS)
def test_kernels(dry, monkeypatch, card, section):
    s = dry(card)
    build = s.build
    monkeypatch.setattr(s, "build", lambda *args: {name: Unrun(x) for name, x in build(*args).items()})
    monkeypatch.setattr(attention, "_cudnn", lambda *args: None)  # its autotuning needs a card
    functions = {"decode": attention.decode, "prefill": attention.prefill, "quant": matmuls.quant}
    functions |= {"check": check.check, "grouped": matmuls.grouped, "sweep": sweep.sweep}
    functions[section](s)
    assert s.failed == []
    assert s.rows


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_steps(dry, card):
    for batch in (1, 64, 256):
        compiled_step(dry(card), card, batch, {})


@pytest.mark.slow
def test_command_buffers_have_an_off_switch(dry):
    s = dry("h200")
    assert compiled_step(s, "h200", 1, {}).thunks.count("kCommandBuffer") == 1
    assert "kCommandBuffer" not in compiled_step(s, "h200", 1, step.NO_GRAPHS).thunks


def compiled_step(s: session.Session, card: str, batch: int, options: dict[str, Any]) -> deviceless.Compiled:
    spec = spec_from_hf(llama.LLAMA_8B, None)
    spec = replace(spec, layers=spec.layers[:2])
    program = forward_program(model.shapes(s, spec, batch, 1024), model.ForwardKey(batch, batch))
    how = {"card": card, "donate": program.donate, "options": options, "dump_ptx": True}
    return deviceless.compile(program.function, *program.arguments, **how)
