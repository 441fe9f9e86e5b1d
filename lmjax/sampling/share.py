"""One device's part of the vocabulary. Few small things travel: best tokens, sums of chunks, candidates, counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True)
class Share:
    """A static argument. With ``axis`` the code runs inside a ``shard_map`` over it: logits are [V_local, S], the rows
    of device d begin at d * V_local, V_local is a multiple of ``chunks.CHUNK`` and the rows from ``vocab`` on are
    padding, -inf. Everything else is whole and equal on all devices, which therefore agree on every branch.

    Without an axis (``WHOLE``) all of this is the identity.
    """

    axis: str | tuple[str, ...] | None = None
    vocab: int | None = None

    def size(self, rows: int) -> int:
        """V, of logits with so many rows here."""
        if self.axis is None:
            return rows
        assert self.vocab is not None
        return self.vocab

    def first(self, count: int) -> jax.Array:
        """int32 []: the first of the ``count`` tokens, chunks, ... that are here."""
        if self.axis is None:
            return jnp.int32(0)
        return lax.axis_index(self.axis).astype(jnp.int32) * jnp.int32(count)

    def local(self, ids: jax.Array, count: int) -> jax.Array:
        """ids int32 -> counted from the first of the ``count`` here; ``count`` for those on other devices."""
        if self.axis is None:
            return ids
        ids = ids - self.first(count)
        return jnp.where((ids >= 0) & (ids < count), ids, jnp.int32(count))

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else lax.pmax(x, self.axis)

    def gather(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """The devices' arrays one after the other along ``axis``."""
        return x if self.axis is None else lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def from_owner(self, ids: jax.Array, count: int, read: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """``read(local ids)`` [S] on the devices that hold ``ids`` [S] among their ``count``, told to all."""
        if self.axis is None:
            return read(ids)
        local = self.local(ids, count)
        here = local < count
        value = read(jnp.where(here, local, jnp.int32(0)))
        return self.sum(jnp.where(here, value, jnp.zeros((), value.dtype)))

    def best(self, value: jax.Array, token: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """The largest ``value`` float32 [S] of all devices and its id, the lowest of equal ones.

        ``token`` int32 [S]: where it is among the ``rows`` here.
        """
        if self.axis is None:
            return value, token
        pair = jnp.stack([lax.bitcast_convert_type(value, jnp.int32), token + self.first(rows)])
        pairs = self.gather(pair[None])  # [devices, 2, S]: one message
        values = lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
        owner = jnp.argmax(values, axis=0)[None, :]
        return values.max(axis=0), jnp.take_along_axis(pairs[:, 1], owner, axis=0, mode="promise_in_bounds")[0]


WHOLE = Share()
