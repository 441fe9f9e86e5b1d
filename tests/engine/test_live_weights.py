"""Weights that change, and an engine that sleeps, under a tiny real model: against engines that had them from the
start."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax import LLM, SamplingParams
from lmjax.types import ParameterError
from lmjax.weights.errors import WeightError
from lmjax.weights.pytree import to_hf
from tests.fixtures import make_model, model_dir

SMALL = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 80}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [f"{i} bottles of beer on the wall, {i} bottles of beer" for i in range(5)]
FORMS = {"plain": {}, "swap space": {"swap_space": 0.01, "preemption_mode": "swap"}}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model with the same config."""
    return make_model(tmp_path_factory.mktemp("other") / "m", seed=1)


@pytest.fixture(scope="module")
def fresh(other):
    with LLM(str(other), **SMALL) as made:
        yield made


@pytest.fixture
def llm():
    with LLM(str(model_dir("RAND")), **SMALL) as made:
        yield made


def answers(llm, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def tokens(llm, *args):
    return [answer.token_ids for answer in answers(llm, *args)]


def pointers(params):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]


def test_the_same_buffers_and_the_answers_of_a_fresh_engine(llm, fresh):
    before, expected = tokens(llm), tokens(fresh)
    assert before != expected
    tree, old = fresh.params, llm.params
    assert llm.set_params(tree) == 1 == llm.weight_version
    assert pointers(llm.params) == pointers(tree) != pointers(old)
    after = answers(llm)  # the same prompts: nothing of the old weights' blocks may be found
    assert [answer.token_ids for answer in after] == expected
    assert {version for answer in after for version in answer.weight_versions} == {1}
    assert all(len(answer.weight_versions) == 12 for answer in after)
    assert llm.set_params(old, version="first", kv_cache="recompute") == "first"
    assert tokens(llm) == before
    with pytest.raises(ParameterError, match="version: is missing; no number follows the present one, 'first'"):
        llm.set_params(tree)
    assert llm.set_params(tree, version=7) == 7 and llm.set_params(tree) == 8
    assert llm.stats().compiles == 0


def test_what_does_not_fit_is_refused_by_name(llm, fresh):
    params, before = llm.params, tokens(llm)
    layer = params.layers[1]
    short = params.replace(layers=(params.layers[0], layer.replace(mlp=layer.mlp.replace(norm=layer.mlp.norm[:-1]))))
    gone = params.replace(norm=jnp.array(params.norm))
    gone.norm.delete()
    for tree, said in (
        (short, r"layers.1.mlp.norm has shape \[511\], the config asks for \[512\]"),
        (gone, "norm has been deleted"),
        (params.replace(layers=params.layers[:1]), "layers.1.attn.norm, .* missing"),
        ({"a": params.norm}, "model.embed_tokens.weight, .* missing .*without a place: a"),
    ):
        with pytest.raises(WeightError, match=f"^params: .*{said}"):
            llm.set_params(tree)
    for version in (1.5, "", True):
        with pytest.raises(ParameterError, match=f"^version: got {version!r}, must be an integer or a text"):
            llm.set_params(fresh.params, version=version)
    with pytest.raises(ParameterError, match="kv_cache: got 'drop', must be one of keep, recompute"):
        llm.set_params(fresh.params, kv_cache="drop")
    assert llm.weight_version == 0 and pointers(llm.params) == pointers(params) and tokens(llm) == before


def test_other_forms_are_converted(llm, fresh):
    """The layout of a checkpoint, and numpy."""
    before = llm.params
    tensors = {name: np.asarray(x) for name, x in to_hf(fresh.params, llm.functional["spec"]).items()}
    for tree in (tensors, fresh.params.replace(norm=np.asarray(fresh.params.norm))):
        llm.set_params(tree)
        assert tokens(llm) == tokens(fresh)
        llm.set_params(before, version=0)


def in_another_thread(llm, prompts, params):
    """The answers to come, and the thread that makes them; it has begun."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(answers(llm, prompts, params)))
    steps = llm.stats().steps
    thread.start()
    while llm.stats().steps < steps + 20:
        time.sleep(0.001)
    return found, thread


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_running_requests_go_on(llm, fresh, kv_cache):
    """Twelve requests in four slots, some of which have not begun, and set_params from this thread."""
    prompts, params = [f"{i} and so on" for i in range(12)], dataclasses.replace(GREEDY, max_tokens=60)
    old = tokens(llm, prompts, params)
    found, thread = in_another_thread(llm, prompts, params)
    llm.set_params(fresh.params, kv_cache=kv_cache)
    thread.join()
    assert [len(answer.token_ids) for answer in found] == [60] * 12
    mixed = [answer for answer in found if len(set(answer.weight_versions)) == 2]
    assert mixed and all(answer.weight_versions == sorted(answer.weight_versions) for answer in found)
    new = tokens(fresh, prompts, params)
    for answer, before, after, prompt in zip(found, old, new, prompts, strict=True):
        count = answer.weight_versions.count(0)
        assert answer.token_ids[:count] == before[:count]
        if count == 0:
            assert answer.token_ids == after
        elif kv_cache == "recompute" and count < 60:
            # from there on it is what the new weights say after all that was said
            said = [*llm.tokenizer.encode(prompt), *answer.token_ids[:count]]
            rest = dataclasses.replace(params, max_tokens=60 - count)
            assert answer.token_ids[count:] == tokens(fresh, [said], rest)[0]
    assert llm.stats().compiles == 0


def test_weights_from_files(llm, fresh, other, tmp_path):
    expected, params = tokens(fresh), dataclasses.replace(GREEDY, max_tokens=200)
    found, thread = in_another_thread(llm, PROMPTS[:4], params)
    assert llm.load_weights(str(other), version="step-100") == "step-100"
    thread.join()
    assert all(set(answer.weight_versions) == {0, "step-100"} for answer in found), "requests went on meanwhile"
    assert tokens(llm) == expected
    another = make_model(tmp_path / "m", config={"num_hidden_layers": 1})
    for path, said in (
        (tmp_path / "nowhere", "no such file or directory"),
        (tmp_path, "has no config.json"),
        (another, "is another model: its layers are 1, those served 2 of them"),
    ):
        with pytest.raises(ValueError, match=said):
            llm.load_weights(str(path), version=1)
    assert llm.weight_version == "step-100" and tokens(llm) == expected
    assert llm.stats().compiles == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(level, form):
    with LLM(str(model_dir("RAND")), **SMALL | FORMS[form]) as llm:
        expected, usable = tokens(llm), llm.info.num_kv_blocks
        llm.sleep(level)
        assert llm.is_sleeping and (llm.params is None) == (level == 2)
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            llm.generate("hello", GREEDY, use_tqdm=False)
        llm.sleep(level)  # again is no error, nor is waking twice
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping and llm.weight_version == 0
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in again] == expected
        assert again[0].num_cached_tokens == 0, "the prefix cache is empty"
        pool = llm._engine.scheduler.state.kv.pools[0]
        assert pool.num_usable == usable and llm.stats().compiles == 0
        with pytest.raises(ParameterError, match="level: got 3, must be 1"):
            llm.sleep(3)


def test_running_requests_wait_while_it_sleeps(llm):
    params = dataclasses.replace(GREEDY, max_tokens=100)
    expected = tokens(llm, PROMPTS, params)
    found, thread = in_another_thread(llm, PROMPTS, params)
    llm.sleep(2)
    steps = llm.stats().steps
    time.sleep(0.1)
    assert llm.stats().steps == steps and thread.is_alive() and llm.stats().num_waiting == 5
    llm.wake_up()
    thread.join()
    assert [answer.token_ids for answer in found] == expected
    assert {version for answer in found for version in answer.weight_versions} == {0}
    assert llm.stats().compiles == 0


def test_waking_with_other_weights(llm, fresh, other):
    expected = tokens(fresh)
    llm.sleep(2)
    llm.wake_up(fresh.params)
    assert llm.weight_version == 1 and tokens(llm) == expected
    llm.sleep(2)
    with pytest.raises(ParameterError, match="the weights were set from arrays, so no file has them"):
        llm.wake_up()
    assert llm.is_sleeping
    llm.load_weights(str(other))  # while it sleeps
    llm.wake_up()
    assert llm.weight_version == 2 and tokens(llm) == expected
    llm.sleep(2)
    llm.wake_up()  # now there is a file
    assert llm.weight_version == 2 and tokens(llm) == expected and llm.stats().compiles == 0


def test_waking_is_only_for_who_sleeps(llm, fresh):
    with pytest.raises(ParameterError, match=r"params: are for an engine that sleeps; .* set_params\(\) does it"):
        llm.wake_up(fresh.params, version="new")
    llm.sleep(1)
    with pytest.raises(ParameterError, match="version: is given without params"):
        llm.wake_up(version="new")
    llm.sleep(2)
    with pytest.raises(RuntimeError, match=r"the weights were freed \(sleep level 2\)"):
        llm.save_pretrained("nowhere")


def test_a_thread_that_waits_for_its_own_waking_is_told(llm):
    answers = llm.as_completed(PROMPTS, [dataclasses.replace(GREEDY, max_tokens=4 + 20 * i) for i in range(5)])
    next(answers)
    llm.sleep(1)
    with pytest.raises(RuntimeError, match=r"the engine sleeps: .*this thread put it to sleep"):
        next(answers)
    llm.wake_up()
    assert len(tokens(llm)) == 5


def test_weights_that_were_donated_are_told_by_name(llm, fresh):
    expected = tokens(fresh)
    answers = llm.as_completed(PROMPTS, [dataclasses.replace(GREEDY, max_tokens=4 + 20 * i) for i in range(5)])
    next(answers)
    for leaf in jax.tree.leaves(llm.params):
        leaf.delete()
    for run in (lambda: next(answers), lambda: tokens(llm)):
        with pytest.raises(RuntimeError, match=r"^params: the engine's arrays were deleted, or donated"):
            run()
    llm.set_params(jax.tree.map(jnp.array, fresh.params))
    assert tokens(llm) == expected


def test_what_a_caller_has_set_around_it_does_not_matter(llm, fresh):
    before = tokens(llm)
    tensors = {name: np.asarray(x) for name, x in to_hf(fresh.params, llm.functional["spec"]).items()}
    for context in (jax.transfer_guard("disallow"), jax.disable_jit()):
        with context:
            assert tokens(llm) == before
            llm.sleep(1)
            llm.wake_up()
    with jax.transfer_guard("disallow"):
        llm.set_params(tensors)
    assert tokens(llm) == tokens(fresh) and llm.stats().compiles == 0
