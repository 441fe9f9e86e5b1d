"""``LLM.embed`` and ``LLM.score`` of an encoder, on real tiny ones: files, batching, limits, live weights."""

import asyncio
import functools

import numpy as np
import pytest

from lmjax import LLM, AsyncEngine, EngineConfig
from lmjax.config import ConfigError
from lmjax.types import ParameterError, PoolingParams
from tests import tiny_encoders as tiny
from tests.models.test_encoder import GOLDENS

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("encoders")
    return functools.cache(lambda name, pooling=None: tiny.write(name, base / f"{name}{pooling}", pooling and MEAN))


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(str(folders("bert", pooling="mean")), **SIZES) as made:
        yield made


def embeddings(llm, prompts, *args, **options):
    return [output.outputs.embedding for output in llm.embed(prompts, *args, use_tqdm=False, **options)]


def unit(x):
    return x / np.linalg.norm(x)


def test_files_of_sentence_transformers_are_followed(llm):
    """Mean and normalised, at most 48 tokens; many texts, in whatever steps."""
    assert llm.info.max_model_len == 48 and not llm.info.generates and llm.info.pooling.width == 24
    ids = [ids.tolist() for ids in tiny.prompts("bert")][:2]
    wanted = [unit(GOLDENS[f"bert/{i}"].mean(0)) for i in range(2)]
    for found, expected in zip(embeddings(llm, ids * 7), wanted * 7, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-5)
    [raw] = embeddings(llm, ids[0], PoolingParams(use_activation=False))
    np.testing.assert_allclose(raw, GOLDENS["bert/0"].mean(0), atol=2e-5)
    stats = llm.stats()
    assert stats.compiles == 0 and stats.num_running == stats.num_waiting == 0
    assert stats.prompt_tokens == 7 * 39 + 37 and stats.steps >= 7 * 37 // 64


def test_texts_get_special_tokens_and_are_cut_on_the_right(llm):
    [short] = llm.embed("ab c", use_tqdm=False)
    a, b, c = (tiny.LETTERS.index(letter) + 4 for letter in "abc")
    assert short.prompt_token_ids == [2, a, b + 26, c, 3]
    with pytest.raises(ParameterError, match=r"^prompt: has 62 tokens, but the model's context length is 48 tokens"):
        llm.embed("a" * 60)
    for keep, length in ((-1, 48), (10, 10), (2, 2), (1, 1)):
        [cut] = llm.embed("a" * 60, truncate_prompt_tokens=keep, use_tqdm=False)
        ids = cut.prompt_token_ids
        assert len(ids) == length and ids[0] == 2 and (ids[-1] == 3 or keep == 1)
    [cut] = llm.embed([list(range(4, 40))], truncate_prompt_tokens=5, use_tqdm=False)
    assert cut.prompt_token_ids == [4, 5, 6, 7, 8]


def test_scores_are_cosines(llm):
    one, two = embeddings(llm, ["one", "two"])
    [score] = llm.score("one", "two", use_tqdm=False)
    assert score.outputs.score == pytest.approx(float(one @ two), abs=1e-6)


def test_a_cross_encoder_reads_pairs(folders):
    path = folders("bert_score")
    with LLM(str(path), **SIZES) as llm:
        pairs = [("ab", "cd"), ("ab", "x y z"), ("hello", "ab")]
        found = [llm.score(*pair, use_tqdm=False)[0] for pair in pairs]
        a, b, c, d = (tiny.LETTERS.index(letter) + 4 for letter in "abcd")
        assert found[0].prompt_token_ids == [2, a, b + 26, 3, c, d + 26, 3]
        raw = [llm.score(*pair, PoolingParams(use_activation=False), use_tqdm=False)[0] for pair in pairs]
        for score, logit in zip(found, raw, strict=True):
            assert score.outputs.score == pytest.approx(1 / (1 + np.exp(-logit.outputs.score)), abs=1e-6)
        together = llm.score(["ab", "ab", "hello"], ["cd", "x y z", "ab"], use_tqdm=False)
        for alone, score in zip(found, together, strict=True):
            assert score.outputs.score == pytest.approx(alone.outputs.score, abs=1e-6)
        # the longer text is cut first
        [cut] = llm.score("a" * 30, "b" * 5, truncate_prompt_tokens=20, use_tqdm=False)
        assert cut.prompt_token_ids.count(3) == 2 and len(cut.prompt_token_ids) == 20
        assert cut.prompt_token_ids[-6:-1] == [b, *[b + 26] * 4]
        with pytest.raises(ParameterError, match=r"^model: .* is a cross-encoder"):
            llm.embed("a")
        with pytest.raises(ParameterError, match=r"^model: .* gives embeddings or scores and no answers"):
            llm.generate("a")


def test_goldens_of_pairs_through_the_engine(folders):
    """Token ids and where the second text begins, as the server passes them on."""

    async def scores():
        config = EngineConfig(model=str(folders("bert_score")), **SIZES, pooler_config={"use_activation": False})
        async with await AsyncEngine.start(config) as engine:
            jobs = [
                engine.pool(ids.tolist(), PoolingParams(), split=split)
                for ids, split in zip(tiny.prompts("bert_score"), tiny.splits("bert_score"), strict=True)
            ]
            found = [np.frombuffer(result.values, np.float32) for result in await asyncio.gather(*jobs)]
            with pytest.raises(ParameterError, match=r"^prompt: has 65 tokens"):
                await engine.pool([5] * 65, PoolingParams())
            # one that nobody waits for any more leaves nothing behind
            task = asyncio.ensure_future(engine.pool([5] * 60, PoolingParams()))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.pool([5], PoolingParams())
            return found

    np.testing.assert_allclose(asyncio.run(scores()), [GOLDENS[f"bert_score/{i}"][0] for i in range(3)], atol=2e-5)


def test_weights_that_sleep_and_come_again(folders):
    with LLM(str(folders("bert")), **SIZES, pooler_config={"pooling_type": "MEAN"}) as llm:
        [before] = embeddings(llm, "abc")
        llm.sleep(2)
        with pytest.raises(RuntimeError, match="sleeps"):
            llm.embed("abc")
        llm.wake_up()
        np.testing.assert_array_equal(embeddings(llm, "abc"), [before])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runner": "generate"}, "--runner: got generate, must be pooling: a bert model is an encoder"),
        ({"max_model_len": 65}, "--max-model-len: got 65, must be at most 64"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: got 2, must be left out: the model is an encoder"),
        ({"swap_space": 1.0}, "--swap-space: got 1.0, must be left out"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "--pooler-config: pooling_type: got 'MAX', must be LAST, MEAN"),
        ({"pooler_config": {"normalise": True}}, "--pooler-config: got the field 'normalise', must be one of"),
        ({"hf_overrides": {"is_decoder": True}}, "--model: .*: is_decoder: got True"),
    ],
)
def test_settings_that_do_not_fit(folders, settings, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM(str(folders("bert")), **settings)
