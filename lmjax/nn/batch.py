"""The ragged batch of one step as the model sees it (device arrays, static shapes T and S)."""

from __future__ import annotations

import jax
from flax import struct


@struct.dataclass
class Batch:
    """Tokens of all rows, one after the other: decode rows (one token each, token i = row i) first, then prefill rows.

    Padding tokens (index >= num_tokens) have position 0 and write into the null block 0; padding rows have
    ``context_lens`` 0 and ``query_lens`` 0.
    """

    token_ids: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T]
    token_rows: jax.Array  # int32 [T]  the row of each token (0 for padding tokens)
    block_tables: jax.Array  # int32 [G, S, P]  of the rows
    query_starts: jax.Array  # int32 [S]  index of the row's first token in T
    query_lens: jax.Array  # int32 [S]  tokens of the row in this step
    context_lens: jax.Array  # int32 [S]  tokens whose KV the row's last token sees, itself included
    logit_tokens: jax.Array  # int32 [S]  index in T of the row's last token (0 for padding rows)
    num_decode: jax.Array  # int32 []
    num_rows: jax.Array  # int32 []
    num_tokens: jax.Array  # int32 []
    adapters: jax.Array | None = None  # int32 [T]  the slot of each token's LoRA adapter, -1 for none
