"""What a caller has as a model's parameters: which leaf of it is which tensor of a Hugging Face checkpoint.

Understood are the engine's own tree, and mappings nested in any way (plain dicts, linen variables, the state of an nnx
module) whose paths are a checkpoint's names, but for what flax calls its leaves.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from lmjax.config import ConfigError
from lmjax.models.names import harmless, hf_names
from lmjax.models.params import DecoderParams, named_leaves
from lmjax.models.spec import DecoderSpec
from lmjax.weights.errors import WeightError
from lmjax.weights.pytree import check_tensors, tensor_shapes

Names = Mapping[str, "str | None"] | Callable[[str], "str | None"]

KERNEL, FLAX_LEAVES = "kernel", ("kernel", "embedding", "scale")  # a checkpoint's "weight"
ACCEPTED = (
    "the engine's DecoderParams (LLM.params), a dict of Hugging Face names to arrays (flat or nested), "
    "an nnx module or its state, or linen variables"
)
_LISTED = re.compile(r"(layers|experts)_(\d+)")  # linen's name of an entry of a list of modules
_STACK = re.compile(r"\{[ie]\}")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a checkpoint in the caller's tree: ``array[take]``; kernel: as flax has it, [*in, *out]."""

    path: str
    array: Any
    take: tuple[int, ...] = ()
    kernel: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape[len(self.take) :])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a tensor of that shape in the checkpoint."""
        if self.kernel and len(shape) == 2:
            return any(
                (math.prod(self.shape[i:]), math.prod(self.shape[:i])) == shape for i in range(1, len(self.shape))
            )
        # a bias of DenseGeneral has several axes
        return self.shape == shape or (len(shape) == 1 and math.prod(self.shape) == shape[0] and len(self.shape) > 1)


def read_tree(tree: Any, spec: DecoderSpec, names: Names | None = None) -> DecoderParams | dict[str, Leaf]:
    """The engine's own tree as it is; of others {name in a checkpoint: leaf}, all that ``spec`` needs.

    names: path in the tree (parts joined by dots) -> name in the checkpoint, a dict or a function; for paths that are
    not in the dict the rule above holds; None: the leaf is left out. A leaf is [*in, *out] if its path or that name
    ends in ``kernel``. ``{i}`` and ``{e}`` in it stand for all layers and experts: the leaf has them as its first axes.
    ``WeightError`` names what is missing, left over, of a wrong shape or no array.
    """
    if isinstance(tree, DecoderParams):
        for name, leaf in named_leaves(tree).items():
            _check_leaf(name, leaf)
        return tree
    found: dict[str, Leaf] = {}
    as_kernels = {part.name for parts in hf_names(spec).values() for part in parts if part.view.transposed}
    for name, leaf in itertools.chain.from_iterable(_named(path, x, names) for path, x in _leaves(_mapping(tree))):
        if name in found:
            raise WeightError("params", f"{found[name].path} and {leaf.path} are both the tensor {name}")
        if not harmless(name, spec):
            # a checkpoint that stores matrices as flax does
            found[name] = replace(leaf, kernel=False) if name in as_kernels else leaf
    wanted = tensor_shapes(spec)

    def shape(name: str, leaf: Leaf) -> tuple[int, ...]:
        return wanted[name] if name in wanted and leaf.fits(wanted[name]) else leaf.shape

    def describe(name: str) -> str:
        path = found[name].path
        return name if path == name else f"{name} (given as {path})"

    check_tensors({name: shape(name, leaf) for name, leaf in found.items()}, spec, describe)
    return found


def check_names(tree: Any, names: Any) -> None:
    """Raises ``ConfigError`` for names of paths that ``tree`` does not have: they would be ignored."""
    if names is None or callable(names):
        return
    if not isinstance(names, Mapping):
        raise ConfigError(f"names: got {names!r:.100}, must be a dict or a function")
    paths = set() if isinstance(tree, DecoderParams) else {path for path, _ in _leaves(_mapping(tree))}
    unknown = [path for path in names if path not in paths]
    if unknown:
        some = f"there are {', '.join(sorted(paths)[:3])}, ..." if paths else "the engine's own tree needs no names"
        raise ConfigError(f"names: {unknown[0]!r} is no path in params; {some}")


def _mapping(tree: Any) -> Mapping[Any, Any]:
    nnx = sys.modules.get("flax.nnx")  # who has a module of it has imported it
    if nnx is not None and isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    if not isinstance(tree, Mapping) or not tree:
        raise WeightError("params", f"got {type(tree).__name__}, must be {ACCEPTED}")
    variables = tree.get("params")
    return variables if isinstance(variables, Mapping) else tree


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(path, array) of all parameters; what flax keeps around them is taken off."""
    if isinstance(tree, Mapping | list | tuple):
        entries = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in entries:
            yield from _leaves(value, (*path, str(key)))
        return
    nnx, name = sys.modules.get("flax.nnx"), ".".join(path)
    if nnx is not None and isinstance(tree, nnx.Variable):
        if not isinstance(tree, nnx.Param):  # keys of random numbers, counters, caches
            return
        tree = tree.get_value()
    if hasattr(tree, "unbox"):  # linen's Partitioned
        tree = tree.unbox()
    if tree is not None:
        _check_leaf(name, tree)
        yield name, tree


def _check_leaf(name: str, leaf: Any) -> None:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype") and hasattr(leaf, "__array__")):
        raise WeightError("params", f"{name} is a {type(leaf).__name__}, must be an array")
    if hasattr(leaf, "is_deleted") and leaf.is_deleted():
        raise WeightError("params", f"{name} has been deleted: was it donated to a program?")
    try:
        known = jnp.issubdtype(leaf.dtype, jnp.floating)
    except TypeError:  # another library's
        known = False
    if not known:
        raise WeightError(
            "params", f"{name} is {leaf.dtype} of shape {list(leaf.shape)}, must be floating-point numbers"
        )


def _named(path: str, array: Any, names: Names | None) -> Iterator[tuple[str, Leaf]]:
    given: str | None = path
    if callable(names):
        given = names(path)
    elif names is not None:
        given = names.get(path, path)
    if given is None:
        return
    name = _as_checkpoint(given)
    kernel = KERNEL in (path.rpartition(".")[2], given.rpartition(".")[2])
    axes = len(_STACK.findall(name))
    if axes > len(array.shape):
        raise WeightError("params", f"{path} has shape {list(array.shape)}, but its name {given} has {axes} axes more")
    for take in itertools.product(*map(range, array.shape[:axes])):
        full = name
        for number in take:
            full = _STACK.sub(str(number), full, count=1)
        yield full, Leaf(path, array, take, kernel)


def _as_checkpoint(path: str) -> str:
    *parts, last = path.split(".")
    parts = [".".join(found.groups()) if (found := _LISTED.fullmatch(part)) else part for part in parts]
    return ".".join([*parts, "weight" if last in FLAX_LEAVES else last])
