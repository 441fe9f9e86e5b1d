"""What the model's code is traced for: the card, and the mesh axis that weights are spread over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platform import CPU, Backend, Target


@dataclass(frozen=True, slots=True)
class Forms:
    """Other forms of the two ops whose loops have bounds known only at run time: what cannot be differentiated."""

    attention: Callable[..., tuple[jax.Array, jax.Array]]  # as models.layer.paged
    moe: Callable[..., jax.Array]  # as nn.moe.moe_mlp


@dataclass(frozen=True, slots=True)
class Env:
    """A static argument. With ``axis`` the code runs inside a ``shard_map``: heads, ffn, experts and vocabulary are
    this device's share, activations are whole, and what each device adds to them is summed explicitly.

    ``spread_experts``: a device holds some experts whole (expert parallel), not a share of each. ``vocab_axis``: what
    the vocabulary is spread over. ``forms``: None for those that serve. ``tile``: columns are computed so many at a
    time (``nn.tiles``), for results that do not depend on how many there are, and every token is a decode row; None:
    all at once.
    """

    target: Target = CPU
    attention: Backend = "auto"
    axis: str | tuple[str, ...] | None = None
    spread_experts: bool = False
    vocab_axis: str | tuple[str, ...] | None = None
    forms: Forms | None = None
    tile: int | None = None

    @property
    def branches(self) -> bool:
        """Whether a program may skip what nobody asks for. On a card the host would wait for the condition."""
        return self.target.platform == "cpu"

    @property
    def for_vocab(self) -> Env:
        """The same for embedding and head."""
        return replace(self, axis=self.vocab_axis)

    def sum(self, x: jax.Array) -> jax.Array:
        """x of all devices added up, in x's dtype: in float32 a decode step would send twice the bytes."""
        return x if self.axis is None else lax.psum(x, self.axis)

    def once(self, x: jax.Array | None) -> jax.Array | None:
        """x on the first device and zeros on the others: in a sum over all devices it counts once."""
        if x is None or self.axis is None:
            return x
        return jnp.where(lax.axis_index(self.axis) == 0, x, jnp.zeros((), x.dtype))

    def gather(self, x: jax.Array) -> jax.Array:
        """[n, ...] of each device -> [devices * n, ...]."""
        return x if self.axis is None else lax.all_gather(x, self.axis, tiled=True)

    def first(self, count: int) -> jax.Array:
        """int32 []: the first of the ``count`` rows, experts, ... that this device holds."""
        if self.axis is None:
            return jnp.int32(0)
        return lax.axis_index(self.axis).astype(jnp.int32) * jnp.int32(count)


ALONE = Env()  # one device, XLA forms: any platform
