"""The decoder against Hugging Face transformers (tests/goldens/tiny.npz, made by scripts/make_goldens.py)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.models.rope import inverse_frequencies
from tests import tiny, tiny_families
from tests.marks import slow
from tests.models.driver import COMPILER_OPTIONS, Driver, params_from

GOLDENS = {
    key: value
    for file in ("tiny", "families")
    for key, value in np.load(__file__.replace("models/test_decoder.py", f"goldens/{file}.npz")).items()
}
TOLERANCE = 1e-4


def spec_of(name):
    case = tiny.CASES[name]
    return spec_from_hf(case.config, case.max_model_len)


@functools.cache
def params_of(name, dtype="float32"):
    tensors = tiny.tensors(name)
    assert str(GOLDENS[f"{name}/checksum"]) == tiny.checksum(tensors), "this numpy draws other weights: remake goldens"
    return params_from(tensors, spec_of(name), dtype)


def make_driver(name, **options):
    return Driver(params_of(name), spec_of(name), **options)


def error(name, prompt, logits):
    """max |difference| / max |reference| of one prompt's logits [tokens, V] at the stored positions."""
    expected = GOLDENS[f"{name}/{prompt}"]
    got = logits[tiny.stored_positions(name)[prompt]]
    assert got.dtype == np.float32 and got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", [name for name in tiny.CASES if f"{name}/inv_freq" in GOLDENS])
def test_frequencies(name):
    rope = spec_of(name).rope
    np.testing.assert_allclose(inverse_frequencies(rope), GOLDENS[f"{name}/inv_freq"], rtol=1e-6)
    assert rope.attention_factor == pytest.approx(float(GOLDENS[f"{name}/attention_factor"]), rel=1e-9)


# frequencies alone (test_frequencies), or what another case has, too
SLOW = {
    *("llama_new_style", "llama_linear", "llama_dynamic_below", "llama_dynamic_above", "llama_llama3_new_style"),
    *("llama_yarn_mscale", "llama_longrope_below", "llama_gelu_tanh", "mistral_no_window", "qwen3_bias"),
    *("mixtral_window", "qwen2_moe_window", "qwen3_moe_window"),
}
ALL = [slow(name) if name in SLOW else name for name in tiny.CASES]


@pytest.mark.parametrize("name", ALL)
def test_one_chunk(name):
    prompts = tiny.prompts(name)
    out = make_driver(name).step(dict(enumerate(prompts)))
    for i in range(len(prompts)):
        assert error(name, i, out[i]) < TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_chunks_beside_decode(name):
    """The first prompt comes in uneven chunks while another sequence, started earlier, decodes one token a step."""
    prompts = tiny.prompts(name)
    first, second = prompts[0], prompts[-1]
    driver = make_driver(name, seed=1)
    got = {"a": [], "b": []}
    done = {"a": 0, "b": 0}
    chunks = itertools.chain([0, 0, 13, 1, 6, 0, 9, 1, 1, 1], itertools.repeat(8))
    while done["a"] < len(first) or done["b"] < len(second):
        work = {}
        for key, ids, count in (("a", first, next(chunks)), ("b", second, 1 if done["b"] else 3)):
            if count and done[key] < len(ids):
                work[key] = ids[done[key] : done[key] + count]
        if not work:
            continue
        for key, logits in driver.step(work).items():
            got[key].append(logits)
            done[key] += len(logits)
    assert error(name, 0, np.concatenate(got["a"])) < TOLERANCE
    assert error(name, len(prompts) - 1, np.concatenate(got["b"])) < TOLERANCE


WINDOWED = [name for name in tiny.CASES if any(x.attention.window for x in spec_of(name).layers)]


QUICK = [*(n for n in WINDOWED if n not in {*tiny_families.FAMILIES, *SLOW}), "gemma3", "olmo3", "gpt_oss"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WINDOWED])
def test_decode_past_the_window(name):
    """With so few blocks that those behind the window must be reused."""
    spec, ids = spec_of(name), tiny.prompts(name)[0]
    group = next(i for i, kv in enumerate(decoder.kv_specs(spec, "float32")) if kv.window)
    driver = make_driver(name, num_blocks=17)
    driver.free[group] = driver.free[group][:4]
    out = [driver.step({0: [token]})[0] for token in ids]
    assert len(out) > 4 * 4  # more than four blocks of four
    assert error(name, 0, np.concatenate(out)) < TOLERANCE


HALVES = {"bfloat16": 0.04, "float16": 0.006}


@pytest.mark.parametrize(("num_blocks", "block_size", "width"), [(40, 1, 37), (5, 16, 5), (300, 8, 64)])
def test_pool_shapes(num_blocks, block_size, width):
    name = "llama_tied_gqa3"
    driver = make_driver(name, num_blocks=num_blocks, block_size=block_size, width=width)
    out = [driver.step({0: tiny.prompts(name)[0][a:b]})[0] for a, b in ((0, 20), (20, 36), (36, 37))]
    assert error(name, 0, np.concatenate(out)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, dtype, most) for name in ("llama_tied_gqa3", "qwen3_bias") for dtype, most in HALVES.items()),
        ("deepseek_v2_lite", "float16", 0.02),
    ],
)
def test_half_precision(name, dtype, tolerance):
    driver = Driver(params_of(name, dtype), spec_of(name), dtype=dtype)
    got = driver.step(dict(enumerate(tiny.prompts(name))))
    assert driver.pools[0].dtype == jnp.dtype(dtype)
    assert max(error(name, i, got[i]) for i in got) < tolerance


def test_kv_groups():
    specs = decoder.kv_specs(spec_of("qwen2_layer_types"), "bfloat16")
    assert [(kv.kind, kv.layers, kv.window) for kv in specs] == [("window", (0, 2), 9), ("full", (1,), None)]
    assert decoder.pool_shape(specs[0], 10, 4) == (2, 2, 10, 1, 4, 16)
    assert specs[0].dtype == "bfloat16"
    [latent] = decoder.kv_specs(spec_of("deepseek_v3"), "bfloat16")
    assert (latent.kind, latent.layers, latent.window) == ("latent", (0, 1), None)
    assert decoder.pool_shape(latent, 10, 4) == (2, 1, 10, 1, 4, 20 + 8)
    assert latent.bytes_per_token() == 2 * (20 + 8) * 2


def test_padding_is_finite_and_reaches_nobody():
    """A step of nothing but padding over a NaN pool (a warm-up does that) leaves later steps right."""
    name = "mistral_window"
    driver = make_driver(name)
    assert driver.step({}) == {}
    written = np.isfinite(np.asarray(driver.pools[0])).any(axis=(0, 1, 3, 4, 5))
    assert written[0] and not written[1:].any()
    assert error(name, 0, driver.step({0: tiny.prompts(name)[0]})[0]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama_tied_gqa3", "qwen2_layer_types", "deepseek_v2_lite"])
def test_pool_is_updated_in_place(name):
    """Temporary bytes do not grow with the number of blocks: nothing copies the pool."""
    spec, params = spec_of(name), params_of(name)

    def temp(num_blocks):
        driver = Driver(params, spec, num_blocks=4, tokens=8)
        batch = driver._batch({}, [], 0)
        pools = tuple(
            jax.ShapeDtypeStruct(decoder.pool_shape(kv, num_blocks, 4), jnp.float32) for kv in driver.kv_specs
        )

        def forward(params, pools, batch):
            return decoder.forward(params, spec, pools, batch)

        compiled = jax.jit(forward, donate_argnums=1).lower(params, pools, batch).compile(COMPILER_OPTIONS)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(5000) - temp(50) < 4096
