"""Runs on 4 CPU devices, in a process of its own: functional.logprobs and generate over a mesh against one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lmjax import functional
from lmjax.parallel.rules import partition_specs
from tests import tiny
from tests.models.driver import params_from

NAME, ROWS, LENGTH, NEW = "qwen3_window", 4, 24, 6


def close(found, wanted, most=1e-5):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= most * np.linalg.norm(want), np.linalg.norm(got - want)


def main():
    assert len(jax.devices()) == 4
    spec = functional.spec_from_hf(tiny.CASES[NAME].config, None)
    params = params_from(tiny.tensors(NAME), spec, "float32")
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, tiny.VOCAB, (ROWS, LENGTH)), jnp.int32)
    seeds = functional.seeds(range(ROWS))
    generate = functools.partial(functional.generate, spec=spec, max_new_tokens=NEW, temperature=0.8)

    def loss(params, tokens):
        found = functional.logprobs(params, tokens, spec=spec)
        return found.mean(), found

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    (_, wanted), gradient = jax.jit(value_and_grad)(params, tokens)
    answers = jax.jit(generate)(params, tokens, seeds)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def own_rows(params, tokens, seeds):
        (_, found), gradient = value_and_grad(params, tokens)
        return found, jax.lax.pmean(gradient, "data"), generate(params, tokens, seeds)

    rows = P("data")
    shared = jax.shard_map(
        own_rows, mesh=mesh, in_specs=(P(), rows, rows), out_specs=(rows, P(), rows), check_vma=False
    )
    found, mean, drawn = jax.jit(shared)(params, tokens, seeds)
    close(found, wanted)
    close(mean, gradient)
    assert drawn.tokens.tolist() == answers.tokens.tolist()
    print("rows")

    mesh = jax.make_mesh((1, 2), ("pp", "tp"), devices=jax.devices()[:2], axis_types=(AxisType.Auto,) * 2)
    specs = partition_specs(spec, False)

    def place(leaf, axes):
        fits = all(axis is None or leaf.shape[i] % 2 == 0 for i, axis in enumerate(axes))
        return jax.device_put(leaf, NamedSharding(mesh, axes if fits else P()))

    spread = jax.tree.map(place, params, specs)
    assert sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(spread)) > 5
    (_, found), cut = jax.jit(value_and_grad)(spread, tokens)
    close(found, wanted)
    close(cut, gradient)
    print("parameters")


if __name__ == "__main__":
    main()
