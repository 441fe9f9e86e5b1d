"""``functional.generate`` against the engine: the same tokens for the same seeds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax import SamplingParams, functional
from lmjax.types import ParameterError
from lmjax.weights.loader import load_params
from lmjax.weights.source import resolve_model
from tests import tiny
from tests.engine.small import CONTEXT, small_llm
from tests.fixtures import model_dir
from tests.models.driver import COMPILER_OPTIONS, params_from

NEW, LENGTHS, SEEDS = 12, (9, 30, 3, 17), (5, 2**63 + 11, -3, 0)


@functools.cache
def model():
    source = resolve_model(str(model_dir("RAND")))
    spec = functional.spec_from_hf(source.config, CONTEXT)
    return spec, load_params(source, spec, "float32")


def prompts():
    rng = np.random.default_rng(8)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


def padded():
    tokens = np.full((len(LENGTHS), max(LENGTHS)), 77, np.int32)
    for row, ids in zip(tokens, prompts(), strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens), jnp.asarray(LENGTHS, jnp.int32)


def generate(key, spec_and_params=None, **how):
    spec, params = spec_and_params or model()
    run = functools.partial(functional.generate, spec=spec, max_new_tokens=NEW, **how)
    tokens, lengths = padded()
    return jax.jit(lambda p, t, n, k: run(p, t, k, lengths=n), compiler_options=COMPILER_OPTIONS)(
        params, tokens, lengths, key
    )


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.001},
    ],
    ids=["greedy", "random", "filtered"],
)
def test_tokens_are_the_engines(how):
    params = [SamplingParams(seed=s, max_tokens=NEW, ignore_eos=True, logprobs=0, **how) for s in SEEDS]
    outputs = small_llm().generate(prompts(), params, use_tqdm=False)
    found = generate(functional.seeds(SEEDS), **how)
    assert found.lengths.tolist() == [NEW] * len(SEEDS)
    for row, out in enumerate(outputs):
        answer = out.outputs[0]
        assert found.tokens[row].tolist() == answer.token_ids
        recorded = [e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True)]
        np.testing.assert_allclose(found.logprobs[row], recorded, atol=1e-4)


def test_stop_ids_end_rows_and_the_loop():
    whole = generate(functional.seeds(SEEDS), temperature=0.9)
    stop = int(whole.tokens[1, 4])
    found = generate(functional.seeds(SEEDS), temperature=0.9, stop_ids=(stop, 511), pad_id=9)
    for row in range(len(SEEDS)):
        tokens = whole.tokens[row].tolist()
        length = next((i + 1 for i, t in enumerate(tokens) if t in (stop, 511)), NEW)
        assert found.lengths[row] == length
        assert found.tokens[row].tolist() == tokens[:length] + [9] * (NEW - length)
        np.testing.assert_allclose(found.logprobs[row, :length], whole.logprobs[row, :length], atol=1e-5)
        assert (found.logprobs[row, length:] == 0).all()
    assert found.lengths[1] <= 5


@pytest.mark.parametrize("name", ["qwen3_window", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_prefill_decode_and_sample_are_the_loops_parts(name):
    """In chunks and by hand, with windows and experts, greedy; the log-probabilities are those of ``logprobs``."""
    spec = functional.spec_from_hf(tiny.CASES[name].config, None)
    params = params_from(tiny.tensors(name), spec, "float32")
    tokens, lengths = padded()
    tokens = tokens % tiny.VOCAB
    run = functools.partial(functional.generate, spec=spec, max_new_tokens=NEW, temperature=0.0)
    whole = jax.jit(lambda p, t, n, k: run(p, t, k, lengths=n), compiler_options=COMPILER_OPTIONS)(
        params, tokens, lengths, jax.random.key(0)
    )
    compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    prefill = compiled(functools.partial(functional.prefill, spec=spec))
    decode = compiled(functools.partial(functional.decode, spec=spec))
    cache = functional.make_cache(spec, len(LENGTHS), max(LENGTHS) + NEW, block_size=8)
    first = jnp.minimum(lengths, 2)
    _, cache = prefill(params, tokens[:, :2], cache, lengths=first)
    index = jnp.minimum(first[:, None] + jnp.arange(28)[None, :], 29)
    rest = jnp.take_along_axis(tokens, index, axis=1)
    logits, cache = prefill(params, rest, cache, lengths=lengths - first, starts=first)
    assert logits.shape == (len(LENGTHS), tiny.VOCAB)
    for step in range(NEW):
        drawn = functional.sample(logits, jax.random.key(1), lengths + step, temperature=0.0)
        assert drawn.tokens.tolist() == whole.tokens[:, step].tolist()
        np.testing.assert_allclose(drawn.logprobs, whole.logprobs[:, step], atol=1e-4)
        logits, cache = decode(params, drawn.tokens, lengths + step, cache)
    row = jnp.concatenate([tokens[1], whole.tokens[1]])[None]
    again = functional.logprobs(params, row, spec=spec)[0, -NEW:]
    np.testing.assert_allclose(again, whole.logprobs[1], atol=1e-4)


def test_keys():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 300)), jnp.float32)
    positions = jnp.asarray([3, 3, 4, 4], jnp.int32)
    typed = functional.sample(logits, jax.random.key(3), positions).tokens
    assert typed.tolist() == functional.sample(logits, jax.random.PRNGKey(3), positions).tokens.tolist()
    assert typed.tolist() != functional.sample(logits, jax.random.key(4), positions).tokens.tolist()
    seeds = functional.row_seeds(jax.random.key(3), 4)
    assert typed.tolist() == functional.sample(logits, seeds, positions).tokens.tolist()
    other = functional.sample(logits, seeds, positions, sample_index=jnp.asarray([1, 2, 3, 4])).tokens
    assert typed.tolist() != other.tolist()
    with pytest.raises(
        ValueError, match=r"key: got uint32\[3, 2\], must be a JAX random key, or seeds uint32 \[4, 2\]"
    ):
        functional.sample(logits, seeds[:3], positions)
    with pytest.raises(ParameterError, match=r"top_p: got 1\.5"):
        functional.sample(logits, seeds, positions, top_p=1.5)


def test_what_does_not_fit_is_refused():
    spec, params = model()
    tokens = jnp.zeros((1, CONTEXT - 2), jnp.int32)
    with pytest.raises(ValueError, match="max_new_tokens: got 3, which after 62 prompt tokens"):
        functional.generate(params, tokens, jax.random.key(0), spec=spec, max_new_tokens=3)
    with pytest.raises(ValueError, match="max_new_tokens: got 0"):
        functional.generate(params, tokens, jax.random.key(0), spec=spec, max_new_tokens=0)
