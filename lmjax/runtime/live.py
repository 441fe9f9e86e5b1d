"""Weights for an engine that is running: what fits it as it is, and files read beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lmjax.config import ConfigError
from lmjax.models.params import dotted
from lmjax.models.spec import DecoderSpec
from lmjax.runtime.identity import digest
from lmjax.runtime.memory import gib
from lmjax.runtime.plan_costs import weights_of
from lmjax.runtime.resolve import Resolved, make_spec
from lmjax.types import ParameterError
from lmjax.weights.errors import WeightError
from lmjax.weights.loader import Progress, Spread, load_params
from lmjax.weights.source import ModelSource, resolve_model


class Loaded(NamedTuple):
    params: Any
    files: str  # equal where the same files were read


Load = Callable[[str | None], Loaded]  # of a path; None: what the engine was started from


class Loading:
    """Files being read in a thread. ``error``: why it failed, once ``done()``."""

    def __init__(self, path: str | None, load: Load):
        self.path = path
        self.loaded: Loaded | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(load,), daemon=True, name="lmjax-weights")
        self._thread.start()

    def _run(self, load: Load) -> None:
        try:
            self.loaded = load(self.path)
        except Exception as error:
            self.error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def take(self) -> Any:
        """The parameter tree, which is not kept here any longer."""
        assert self.loaded is not None, "loading has failed, or is not done"
        params, self.loaded = self.loaded.params, None
        return params


def read_weights(resolved: Resolved, source: ModelSource, load_format: str, progress: Progress | None = None) -> Any:
    """The parameter tree of the model's files, on its devices."""
    config, spread = resolved.config, None
    if resolved.placement:
        spread = Spread(resolved.spec, resolved.shapes((), resolved.spec.max_len).params())
    spec = resolved.model_spec(config.max_model_len)
    return load_params(source, spec, resolved.dtype, load_format, config.seed, progress, spread, config.quantization)


def load_beside(resolved: Resolved, num_sharing: int, free: Callable[[], int], path: str | None) -> Loaded:
    """Weights of the model that is served, from a directory or a .gguf file; None: from where it was started.

    num_sharing: how many devices share what ``free`` tells (bytes). Raises ``WeightError`` where the files are of
    another model, and ``ConfigError`` where both sets of weights do not fit; nothing was read then.
    """
    config, source = resolved.config, resolved.source
    if path is not None:
        source = _source(config.hf_overrides, path)
        check_same(make_spec(resolved.source, config.max_model_len), _spec(source, config.max_model_len), path)
    need, there = weights_of(resolved.spec, resolved.dtype, resolved.degree).bytes * num_sharing, free()
    if need > there:
        raise ConfigError(
            f"the weights need {gib(need)} beside what is in use, but only {gib(there)} of memory are free; "
            "put the engine to sleep first (level 2), or give it a smaller KV pool"
        )
    load_format = "auto" if path is not None and config.load_format == "dummy" else config.load_format
    return Loaded(read_weights(resolved, source, load_format), file_digest(source))


def file_digest(source: ModelSource) -> str:
    files = sorted(source.weights.glob("*.safetensors")) if source.kind == "hf" else [source.weights]
    return digest(repr([(path.name, path.stat().st_size) for path in files]))


def _source(overrides: dict[str, Any] | None, path: str) -> ModelSource:
    if not path or not Path(path).expanduser().exists():
        raise WeightError(repr(path), "no such file or directory")
    return resolve_model(str(Path(path).expanduser().absolute()), hf_overrides=overrides or None)


def _spec(source: ModelSource, max_model_len: int | None) -> DecoderSpec:
    try:
        return make_spec(source, max_model_len)
    except (ConfigError, WeightError) as error:
        raise WeightError(source.path, f"is no model of this kind: {error}") from error


def check_same(served: DecoderSpec, other: DecoderSpec, path: str) -> None:
    """Raises ``WeightError`` where the weights of one could not be the other's."""
    for f in fields(served):
        ours, theirs = getattr(served, f.name), getattr(other, f.name)
        if ours == theirs:
            continue
        if isinstance(ours, tuple) and isinstance(theirs, tuple):
            if len(ours) != len(theirs):
                ours, theirs = f"{len(ours)} of them", f"{len(theirs)}"
            else:
                ours, theirs = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
        raise WeightError(path, f"is another model: its {f.name} are {theirs!s:.300}, those served {ours!s:.300}")


def layout_of(params: Any) -> Any:
    """The tree with abstract arrays: shape, dtype and sharding of each."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), params)


def check_layout(tree: Any, layout: Any) -> None:
    """Raises ``ParameterError`` with the first leaf in which a tree differs from what programs were compiled for."""
    wanted = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(layout)}
    structure: Any = jax.tree.structure(tree)
    if structure != jax.tree.structure(layout):
        raise ParameterError("params", _structure_error(tree, wanted))
    for (name, want), leaf in zip(wanted.items(), jax.tree.leaves(tree), strict=True):
        if not isinstance(leaf, jax.Array):
            raise ParameterError("params", f"{name} is a {type(leaf).__name__}, must be a jax.Array")
        if leaf.is_deleted():
            raise ParameterError("params", f"{name} was deleted or donated")
        if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
            ours, theirs = (f"{a.dtype}{list(a.shape)}" for a in (want, leaf))
            raise ParameterError("params", f"{name} is {theirs}, must be {ours}")
        sharding = want.sharding
        same = leaf.sharding.is_equivalent_to(sharding, leaf.ndim) and leaf.sharding.memory_kind == sharding.memory_kind
        if not same:
            raise ParameterError("params", f"{name} has the sharding {leaf.sharding}, must have {sharding}")


def _structure_error(tree: Any, wanted: dict[str, Any]) -> str:
    try:
        found = {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    except TypeError:
        found = set()
    missing = [name for name in wanted if name not in found]
    extra = sorted(found - wanted.keys())
    if missing or extra:
        what = [f"{word} {', '.join(names[:3])}" for word, names in (("lacks", missing), ("has", extra)) if names]
        return f"is not a tree as LLM.params: it {' and '.join(what)}"
    return f"is a {type(tree).__name__} with the right leaves; its nodes must be those of LLM.params"


def zeros(tree: Any) -> Any:
    """Arrays for abstract ones."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), tree)


def maker_of_zeros(layout: Any) -> Any:
    """A program that makes such arrays, compiled now: ``zeros`` itself is compiled anew where JAX's context (its mesh,
    say) is another one than before, as it may be where a caller wakes the engine."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, layout)

    def make() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layout)

    return jax.jit(make, out_shardings=shardings).lower().compile()
