"""examples/distill.py: the student comes near its teacher, by what the teacher says of the student's own tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from safetensors.numpy import load_file

from examples import distill
from lmjax import LLM, functional
from lmjax.weights.pytree import to_hf
from tests.functional import plain
from tests.runtime.tiny import tiny_model

pytestmark = pytest.mark.timeout(900)
FLAGS = ["--steps", "40", "--teacher-steps", "40", "--batch", "32", "--length", "20"]


@pytest.fixture(scope="module", autouse=True)
def small():
    """A teacher of one layer, which compiles faster; it learns once. optax needs the standard promotion of types."""
    toy_teacher = distill.toy_teacher
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setitem(distill.TEACHER, "num_hidden_layers", 1)
        learn = functools.cache(lambda steps: toy_teacher(steps, np.random.default_rng(0)))
        patch.setattr(distill, "toy_teacher", lambda steps, rng: learn(steps))
        yield


def test_the_student_comes_near_and_nothing_is_copied(monkeypatch):
    real, calls = LLM.set_params, []

    def set_params(llm, params):
        version = real(llm, params)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(llm.params), strict=True)
        calls.append(all(a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() for a, b in pairs))
        return version

    monkeypatch.setattr(LLM, "set_params", set_params)
    result = distill.main(FLAGS)
    assert calls == [True] * 40
    assert result.kl[1] < result.kl[0] / 4, result
    assert result.agreement[1] > result.agreement[0] + 0.25, result
    assert result.tokens_per_second > 0


@pytest.mark.slow
def test_what_the_teacher_thinks_of_other_answers_does_not_help(monkeypatch):
    real, rng = distill.trainer, np.random.default_rng(0)

    def shuffled(*how):
        step = real(*how)
        return lambda tokens, theirs, counts: step(tokens, rng.permutation(theirs), counts)

    monkeypatch.setattr(distill, "trainer", shuffled)
    result = distill.main(FLAGS)
    # only the entropy is left of the objective: it ends as a uniform distribution, which is nearer than a random one
    assert result.kl[1] > result.kl[0] / 2, result
    assert result.agreement[1] < 0.3, result


def exact_kl(variables, tokens, theirs, module):
    """Of the last place of one row, by a plain flax model. theirs: float32 [V]."""
    ours = jax.nn.log_softmax(module.apply(variables, tokens)[0, -1])
    return (jnp.exp(ours) * (ours - theirs)).sum()


def test_the_expected_gradient_is_that_of_the_exact_kl():
    """Every symbol once as the token drawn, weighted with its probability: no sampling is left."""
    config = distill.STUDENT | {"tie_word_embeddings": False, "rope_theta": 10000.0}
    spec = functional.spec_from_hf(config, None)
    params = functional.init_params(spec, "float32", 3)
    tensors = {name: np.asarray(x) for name, x in to_hf(params, spec).items()}
    module, variables = plain.Decoder(FrozenDict(config), (None,)), plain.to_linen(tensors)
    prompt, size = np.array([3, 1, 4, 1, 5]), distill.SYMBOLS
    theirs = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (size,)) * 2)
    expected = jax.jit(jax.grad(exact_kl), static_argnums=3)(variables, prompt[None], theirs, module)
    ours = jax.nn.log_softmax(module.apply(variables, prompt[None])[0, -1])

    tokens = np.stack([[*prompt, symbol] for symbol in range(size)])
    counts, scores = np.zeros((size, 5), np.float32), np.zeros((size, 5), np.float32)
    counts[:, -1], scores[:, -1] = np.exp(ours), theirs
    batch = {"tokens": tokens, "theirs": scores, "counts": counts}

    @jax.jit
    @jax.grad
    def gradient(params):
        return distill.loss(distill.Model(params), **batch, how={"spec": spec}, forward=False)

    found = to_hf(gradient(params), spec)
    wanted = plain.from_linen(expected, list(found))
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("flags", [["--teacher", "x"], ["--student", "x", "--prompts", "y"]])
def test_models_come_together(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        distill.main(flags)
    assert stop.value.code == 2 and "give all of them or none" in capsys.readouterr().err


@pytest.mark.slow
def test_models_of_files_on_the_teachers_samples(tmp_path):
    model, prompts, out = str(tiny_model()), tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("one\nanother\n\nthree\n")
    flags = ["--teacher", model, "--student", model, "--prompts", str(prompts), "--output", str(out)]
    more = ["--objective", "forward", "--steps", "2", "--batch", "8", "--learning-rate", "1e-4"]
    result = distill.main([*flags, *more])
    assert result.kl[0] == 0 and result.agreement[0] == 1, result  # it is its own teacher
    assert 0 < abs(result.kl[1]) < 0.01 and result.agreement[1] > 0.9, result
    before, after = load_file(tiny_model() / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(0 < np.abs(x - after[name]).max() < 1e-3 for name, x in before.items())
