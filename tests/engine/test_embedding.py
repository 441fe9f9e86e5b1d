"""``LLM.embed`` and ``LLM.score`` of a decoder against a plain flax decoder, on a real tiny engine."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmjax import LLM, SamplingParams
from lmjax.config import ConfigError
from lmjax.types import ParameterError, PoolingParams
from lmjax.weights.errors import WeightError
from tests.engine.small import CONTEXT, SIZES, plain_hidden, small_llm
from tests.fixtures import model_dir

VOCAB, WIDTH = 512, 512


def texts(*lengths):
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def expected(ids, kind, normalize=True):
    hidden = plain_hidden(ids)
    found = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind]
    return found / np.linalg.norm(found) if normalize else found


def embeddings(llm, prompts, *args, **options):
    return [output.outputs.embedding for output in llm.embed(prompts, *args, use_tqdm=False, **options)]


def check(llm, prompts, kind, normalize=True):
    for found, ids in zip(embeddings(llm, prompts), prompts, strict=True):
        assert found.dtype == np.float32 and found.shape == (WIDTH,)
        np.testing.assert_allclose(found, expected(ids, kind, normalize), atol=2e-4 if normalize else 2e-3)


def test_a_generating_engine_embeds_beside_answers():
    """A generator in between: both use the same steps, and no program is compiled."""
    llm, greedy = small_llm(), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    stream = llm.stream("outer", greedy)
    tokens = list(next(stream).deltas[0].token_ids)
    check(llm, texts(CONTEXT, 1, 17, 16, 33, CONTEXT), "last")
    for update in stream:
        tokens += update.deltas[0].token_ids
    [alone] = llm.generate("outer", greedy, use_tqdm=False)
    assert tokens == alone.outputs[0].token_ids
    stats = llm.stats()
    assert stats.compiles == 0 and stats.num_running == 0 and stats.kv_usage == 0


def write_model(path, pooling=None, bare=False, **config):
    """RAND again, with what sentence-transformers or an AutoModel's save_pretrained would write."""
    shutil.copytree(model_dir("RAND"), path)
    values = json.loads((path / "config.json").read_text()) | config
    if bare:
        values["architectures"] = ["LlamaModel"]
        weights = load_file(path / "model.safetensors")
        del weights["lm_head.weight"]
        save_file({n.removeprefix("model."): w for n, w in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(values))
    if pooling:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        kinds = ["Transformer", "Pooling"]
        modules = [{"path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "sentence_bert_config.json").write_text('{"max_seq_length": 48, "do_lower_case": true}')
    return str(path)


def test_sentence_transformers_files_are_followed(tmp_path):
    """Mean pooling without normalisation, in chunks; texts of at most 48 tokens, in lower case."""
    path = write_model(tmp_path / "model", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    sizes = {k: v for k, v in SIZES.items() if k != "max_model_len"}
    with LLM(path, **sizes, hf_overrides={"matryoshka_dimensions": [8, 64]}) as llm:
        assert llm.info.max_model_len == 48 and not llm.info.generates
        prompts = texts(48, 1, 17, 16, 33, 48)
        check(llm, prompts + prompts, "mean", normalize=False)
        assert llm.stats().compiles == 0
        short, long = embeddings(llm, prompts[:1], PoolingParams(dimensions=8)), embeddings(llm, prompts[:1])
        np.testing.assert_array_equal(short[0], long[0][:8])
        [unit] = embeddings(llm, prompts[:1], PoolingParams(dimensions=8, use_activation=True))
        np.testing.assert_allclose(unit, short[0] / np.linalg.norm(short[0]), atol=1e-6)
        first, second = llm.embed(["Some TEXT", "sOME text"], use_tqdm=False)
        assert first.prompt_token_ids == second.prompt_token_ids == list(b"some text")
        cut = llm.embed("x" * 60, truncate_prompt_tokens=-1, use_tqdm=False)[0].prompt_token_ids
        assert cut == [120] * 48
        for params, message in (
            (PoolingParams(dimensions=9), "dimensions: got 9, must be one of 8, 64"),
            (PoolingParams(truncate_prompt_tokens=49), "truncate_prompt_tokens: got 49, must be at most"),
        ):
            with pytest.raises(ParameterError, match=f"^{message}"):
                llm.embed("a", params)
        for call in (lambda: llm.generate("a"), lambda: llm.logprobs([1, 2])):
            with pytest.raises(ParameterError, match=r"^model: .* gives embeddings or scores and no answers"):
                call()


def test_what_is_no_number_is_no_embedding():
    llm = small_llm()
    good = llm.params
    llm.set_params(good.replace(norm=good.norm * np.float32(np.nan)))
    try:
        with pytest.raises(RuntimeError, match="the model's result is not finite"):
            llm.embed("a", use_tqdm=False)
    finally:
        llm.set_params(good)
    assert np.isfinite(embeddings(llm, ["a"])).all()


def test_modules_are_folders_of_the_model(tmp_path):
    path = write_model(tmp_path / "model", {"pooling_mode_mean_tokens": True})
    modules = Path(path) / "modules.json"
    modules.write_text(modules.read_text().replace("1_Pooling", "../1_Pooling"))
    with pytest.raises(WeightError, match=r"modules.json: path: got '../1_Pooling', must be a folder of the model's"):
        LLM(path)


def test_a_decoder_without_its_head(tmp_path):
    path = write_model(tmp_path / "model", bare=True)
    with LLM(path, **SIZES, pooler_config={"pooling_type": "CLS", "use_activation": False}) as llm:
        assert not llm.info.generates
        check(llm, texts(40, 3), "cls", normalize=False)
    with pytest.raises(ConfigError, match=r"^--runner: got generate, must be pooling: a LlamaModel has no head"):
        LLM(path, runner="generate")


def test_scores_are_cosines():
    llm = small_llm()
    one, other, third = embeddings(llm, ["one", "the other", "third"])
    found = [output.outputs.score for output in llm.score("one", ["the other", "third", "one"], use_tqdm=False)]
    np.testing.assert_allclose(found, [one @ other, one @ third, 1.0], atol=1e-5)
    found = llm.score(["one", "third"], ["third", "the other"], use_tqdm=False)
    np.testing.assert_allclose([o.outputs.score for o in found], [one @ third, third @ other], atol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "prompt: is empty"),
        ([[1, VOCAB]], None, f"prompt: got the token id {VOCAB}"),
        ([1] * (CONTEXT + 1), None, f"prompt: has {CONTEXT + 1} tokens, but the model's context length is {CONTEXT}"),
        ("a", PoolingParams(dimensions=8), f"dimensions: got 8, must be {WIDTH} or absent"),
    ],
)
def test_what_cannot_be_embedded_is_refused(prompts, params, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        small_llm().embed(prompts, params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 0}, "dimensions: got 0, must be an integer of at least 1"),
        ({"dimensions": True}, "dimensions: got True"),
        ({"use_activation": 1}, "use_activation: got 1, must be true or false"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: got -2, must be -1 or"),
    ],
)
def test_wrong_parameters(fields, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        PoolingParams(**fields)


def test_score_needs_texts_that_pair_up():
    for data, message in (
        ((["a", "b"], ["c"]), "data_1: got 2 texts for 1"),
        (("a", []), "data_2: must be a text or a list of texts"),
    ):
        with pytest.raises(ParameterError, match=f"^{message}"):
            small_llm().score(*data)
