"""Names of full KV blocks: a hash chain, so that equal names mean equal prefixes."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16
_EMPTY_ROOT = bytes(DIGEST_BYTES)
_fresh = blake2b(digest_size=DIGEST_BYTES).copy  # a copy of a new hash costs half of making one


def root_digest(adapter: int | None, cache_salt: str | None, weights: int = 0) -> bytes:
    """The parent of a sequence's first block. Requests with another adapter or salt share no block, nor do those that
    came before and after a change of the weights (``weights``: how many changes there were)."""
    if adapter is None and cache_salt is None and not weights:
        return _EMPTY_ROOT
    return blake2b(repr((adapter, cache_salt, weights)).encode(), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """128-bit blake2b of the parent's digest and the block's int32 token ids."""
    name = _fresh()
    name.update(parent + tokens)
    return name.digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: np.ndarray, block_size: int) -> None:
    """Appends the digests of the full blocks of ``tokens`` (int32 [n]) that ``digests`` does not have yet."""
    first, total = len(digests), len(tokens) // block_size
    if first >= total:
        return
    parent = digests[-1] if digests else root
    width = 4 * block_size
    data = tokens[first * block_size : total * block_size].tobytes()
    for at in range(0, len(data), width):
        parent = block_digest(parent, data[at : at + width])
        digests.append(parent)
