"""With the ``env`` of a deterministic engine the functions give that engine's bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax import LLM, SamplingParams, functional
from tests.fixtures import model_dir

NEW, LENGTHS, SEEDS = 6, (9, 20, 3), (5, 7, 11)


@functools.cache
def exact_llm():
    return LLM(
        str(model_dir("RAND")),
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=32,
        deterministic=True,
        num_gpu_blocks_override=24,
    )


@functools.cache
def answers():
    """Prompts [3, 20] with their answers' tokens, and the bits recorded."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, 256, length).tolist() for length in LENGTHS]
    params = [SamplingParams(seed=s, temperature=0.9, max_tokens=NEW, ignore_eos=True, logprobs=0) for s in SEEDS]
    outputs = [out.outputs[0] for out in exact_llm().generate(prompts, params, use_tqdm=False)]
    recorded = [[e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    return prompts, [o.token_ids for o in outputs], np.asarray(recorded, np.float32)


def rows_of(sequences, padding):
    tokens = np.full((len(sequences), max(map(len, sequences))), padding, np.int32)
    for row, ids in zip(tokens, sequences, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens), jnp.asarray([len(ids) for ids in sequences], jnp.int32)


def test_generate_gives_the_engines_bits():
    prompts, tokens, recorded = answers()
    llm = exact_llm()
    rows, lengths = rows_of(prompts, 0)
    run = functools.partial(functional.generate, max_new_tokens=NEW, temperature=0.9, **llm.functional)
    found = jax.jit(lambda p, t, n, k: run(p, t, k, lengths=n))(llm.params, rows, lengths, functional.seeds(SEEDS))
    assert found.tokens.tolist() == tokens
    np.testing.assert_array_equal(np.asarray(found.logprobs), recorded)


@pytest.mark.parametrize("padding", [0, -1, -100, 511])
def test_what_pads_the_rows_changes_no_bit(padding):
    prompts, tokens, recorded = answers()
    llm = exact_llm()
    rows, lengths = rows_of([p + t for p, t in zip(prompts, tokens, strict=True)], padding)
    found = functional.logprobs(llm.params, rows, lengths=lengths, **llm.functional)
    for row, length, want in zip(np.asarray(found), lengths.tolist(), recorded, strict=True):
        np.testing.assert_array_equal(row[length - 1 - NEW : length - 1], want)


def test_vmap_and_grad_keep_the_bits():
    prompts, tokens, recorded = answers()
    llm = exact_llm()
    rows, lengths = rows_of([p + t for p, t in zip(prompts, tokens, strict=True)], 0)

    def loss(params, row, length):
        found = functional.logprobs(params, row[None], lengths=length[None], **llm.functional)[0]
        return found.sum(), found

    grad = jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0, 0))
    (_, found), gradient = jax.jit(grad)(llm.params, rows, lengths)
    for row, length, want in zip(np.asarray(found), lengths.tolist(), recorded, strict=True):
        np.testing.assert_array_equal(row[length - 1 - NEW : length - 1], want)
    assert float(jnp.abs(gradient.norm).max()) > 0
