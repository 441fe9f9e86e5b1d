"""One tick of a rolling pipeline, in one program: every stage runs the step that it holds, and hidden states move on.

A step enters at stage 0 and is at stage s, s ticks later. Stages have what they need of their own: weights, KV, block
tables (patched when the step that brings the patches is there: so a block that was given to another request is safe)
and the hidden states that came in. Embedding and head are spread over all devices; each does its part of the step that
enters and of the one that leaves. No collective depends on the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.models import decoder
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import Env
from lmjax.parallel.rules import PP
from lmjax.runtime.buckets import ForwardKey
from lmjax.runtime.forward import Pools, pooled_sums, prompt_logprobs, take_tokens, unpack_batch
from lmjax.runtime.inputs import forward_layout
from lmjax.runtime.state import apply_patches, copy_blocks, swap_in, swap_out
from lmjax.sampling.share import Share


def make_tick(
    spec: DecoderSpec, key: ForwardKey, block_size: int, max_logprobs: int, stages: int, env: Env
) -> Callable[..., Any]:
    """``(params, pools, tokens, tables, hidden, packed) -> (logits [V, S], pools, tokens, tables, hidden, prompt
    log-probabilities)``; donate pools, tokens, tables and hidden.

    Of one device: ``spec`` its share, tables int32 [1, G, slots + 1, P], hidden [1, most tokens, D]. packed: int32
    [stages, size], the step at each stage. Logits and log-probabilities are those of the step at the last stage.
    """

    def tick(
        params: Any, pools: Pools, tokens: jax.Array, tables: jax.Array, hidden: jax.Array, packed: jax.Array
    ) -> tuple[Any, ...]:
        layout = forward_layout(key, len(pools), block_size)
        stage = lax.axis_index(PP)
        entering, here, leaving = (layout.split(packed[i]) for i in (0, stage, stages - 1))
        token_ids, tokens = take_tokens(entering, tokens)
        entered = decoder.embed(params, spec, token_ids, entering["positions"], env)
        x = jnp.where(stage == 0, entered, hidden[0, : key.num_tokens].T)
        own_tables = apply_patches(tables[0], here["patches"])
        batch = unpack_batch(here, token_ids, own_tables)
        x, pools = decoder.run_layers(jax.tree.map(lambda w: w[0], params.layers), spec, x, pools, batch, env)

        def from_last(columns: jax.Array) -> jax.Array:
            normed = decoder.final_norm(params, spec, columns)
            return lax.psum(jnp.where(stage == stages - 1, normed, jnp.zeros((), normed.dtype)), PP)

        def head(columns: jax.Array) -> jax.Array:
            return decoder.logits(params, spec, columns, env)

        prompt = None
        if key.prompt_logprobs:
            # of all tokens at once, not in every turn of the loop over them
            last = from_last(x)
            found = prompt_logprobs(head, last, leaving, max_logprobs, Share(env.vocab_axis, spec.vocab), env)
            prompt = found, pooled_sums(last, leaving)
            logits = head(last[:, leaving["logit_tokens"]])
        else:
            logits = head(from_last(x[:, leaving["logit_tokens"]]))
        moved = lax.ppermute(x.T, PP, [(i, i + 1) for i in range(stages - 1)])
        hidden = lax.dynamic_update_slice(hidden, moved[None], (0, 0, 0))
        return logits, pools, tokens, own_tables[None], hidden, prompt

    return tick


def patch_stage(tables: jax.Array, patches: jax.Array) -> jax.Array:
    """``apply_patches`` of one device: tables [1, G, slots + 1, P], patches int32 [stages, M, 4]."""
    return apply_patches(tables[0], patches[lax.axis_index(PP)])[None]


def copy_in_stage(pools: Pools, pairs: jax.Array) -> Pools:
    """``copy_blocks`` of one device. pairs: int32 [stages, G, COPY_BATCH, 2]."""
    return copy_blocks(pools, pairs[lax.axis_index(PP)])


def swap_out_of_stage(pools: Pools, pairs: jax.Array) -> Pools:
    """``swap_out`` of one device. pairs: int32 [stages, G, SWAP_BATCH, 2]."""
    return swap_out(pools, pairs[lax.axis_index(PP)])


def swap_into_stage(pools: Pools, blocks: Pools, pairs: jax.Array) -> tuple[Pools, jax.Array]:
    """``swap_in`` of one device. pairs: int32 [stages, G, SWAP_BATCH, 2]. Also returns int32 [1, G]."""
    pools, done = swap_in(pools, blocks, pairs[lax.axis_index(PP)])
    return pools, done[None]
