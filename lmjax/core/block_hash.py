"""Names of full KV blocks: a hash chain, so that equal names mean equal prefixes."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16
_EMPTY_ROOT = bytes(DIGEST_BYTES)


def root_digest(adapter: str | None, cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block. Requests with another adapter or salt share no block."""
    if adapter is None and cache_salt is None:
        return _EMPTY_ROOT
    return blake2b(repr((adapter, cache_salt)).encode(), digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """128-bit blake2b of the parent's digest and the block's int32 token ids."""
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def block_digests(parents: list[bytes], blocks: list[bytes]) -> list[bytes]:
    """``block_digest`` of each."""
    pairs = zip(parents, blocks, strict=True)
    return [blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest() for parent, tokens in pairs]


def extend_digests(digests: list[bytes], root: bytes, tokens: np.ndarray, block_size: int) -> None:
    """Appends the digests of the full blocks of ``tokens`` (int32 [n]) that ``digests`` does not have yet."""
    first, total = len(digests), len(tokens) // block_size
    if first >= total:
        return
    parent = digests[-1] if digests else root
    width = 4 * block_size
    data = tokens[first * block_size : total * block_size].tobytes()
    for at in range(0, len(data), width):
        parent = blake2b(parent + data[at : at + width], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
