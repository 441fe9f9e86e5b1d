"""Encoders against Hugging Face transformers (tests/goldens/encoders.npz, made by scripts/make_goldens.py)."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.core.plan import WholePlan
from lmjax.models import encoder
from lmjax.models.encoder_spec import encoder_from_hf
from lmjax.runtime.encoder import pack
from lmjax.weights.encoder import load_encoder
from lmjax.weights.errors import WeightError
from lmjax.weights.source import directory_source
from tests import tiny_encoders as tiny

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "encoders.npz")
SCORING = ("bert_score", "roberta_score")


@functools.cache
def model(name, folder):
    source = directory_source(tiny.write(name, folder))
    assert str(GOLDENS[f"{name}/checksum"]) == tiny.checksum(name), "this numpy draws other weights: remake goldens"
    spec = encoder_from_hf(source.config, None)
    return spec, load_encoder(source, spec, "float32")


def run(spec, params, texts, splits, pooling, num_tokens, num_rows=4):
    plan = WholePlan(
        0,
        np.arange(len(texts)),
        np.array([len(ids) for ids in texts], np.int32),
        np.array(splits, np.int32),
        [pooling] * len(texts),
        np.concatenate(texts),
    )
    packed = np.full((5, num_tokens), 7, np.int32)  # of the step before
    pack(plan, packed, num_rows)
    return np.asarray(compiled(spec, num_rows)(params, jnp.asarray(packed)))[: len(texts)]


@functools.cache
def compiled(spec, num_rows):
    return jax.jit(lambda p, x: encoder.forward(p, spec, encoder.EncoderBatch(*x), num_rows))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", ["bert", "bert_old", "xlmr"])
def test_hidden_states_are_those_of_transformers(name, pooling, tmp_path_factory):
    """Three texts in one step: none sees the others, nor the padding."""
    spec, params = model(name, tmp_path_factory.getbasetemp() / name)
    found = run(spec, params, tiny.prompts(name), tiny.splits(name), pooling, 128)
    for i, sums in enumerate(found):
        hidden = GOLDENS[f"{name}/{i}"]
        wanted = {"mean": hidden.sum(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        np.testing.assert_allclose(sums, wanted, atol=2e-5 * len(hidden), rtol=2e-5)


@pytest.mark.parametrize("name", SCORING)
def test_scores_are_those_of_transformers(name, tmp_path_factory):
    spec, params = model(name, tmp_path_factory.getbasetemp() / name)
    assert spec.scores and spec.sigmoid
    found = run(spec, params, tiny.prompts(name), tiny.splits(name), "cls", 128)
    np.testing.assert_allclose(found, np.concatenate([GOLDENS[f"{name}/{i}"] for i in range(3)]), atol=2e-5)


@pytest.mark.parametrize("num_tokens", [512, 700, 1100])
def test_wide_steps_are_computed_in_blocks(num_tokens, tmp_path_factory):
    """Queries in blocks of 512, the last one overlapping; each sees the keys of its own text alone."""
    spec, params = model("bert", tmp_path_factory.getbasetemp() / "bert")
    rng = np.random.default_rng(3)
    lengths = [64] * (num_tokens // 64)
    lengths[-1] -= 5
    texts = [rng.integers(4, tiny.VOCAB, n).astype(np.int32) for n in lengths]
    found = run(spec, params, texts, [0] * len(texts), "mean", num_tokens, num_rows=32)
    for ids, sums in zip(texts, found, strict=True):
        np.testing.assert_allclose(sums, run(spec, params, [ids], [0], "mean", 64)[0], atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: got 'relative_key', must be absolute"),
        ({"architectures": ["BertForTokenClassification"]}, "architectures: got 'BertForTokenClassification', must be"),
        ({"is_decoder": True}, "is_decoder: got True"),
        ({"hidden_act": "tanh"}, "hidden_act: got 'tanh'"),
        ({"hidden_size": 25}, "hidden_size: got 25, must be a multiple"),
        ({"architectures": ["BertForSequenceClassification"]}, "num_labels: got 2, must be 1"),
        ({"sbert_ce_default_activation_function": "torch.nn.Tanh"}, "activation_fn: got 'torch.nn.Tanh'"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        encoder_from_hf(tiny.CASES["bert"] | changes, None)
    with pytest.raises(ValueError, match=r"^max_model_len: got 65, must be at most 64"):
        encoder_from_hf(tiny.CASES["xlmr"], 65)


def test_an_activation_that_the_config_names():
    named = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    assert not encoder_from_hf(tiny.CASES["bert_score"] | named, None).sigmoid


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "bert",
            {"num_hidden_layers": 3},
            "16 tensors missing, the first is encoder.layer.2.attention",
        ),
        ("bert", {"num_hidden_layers": 1}, "tensor encoder.layer.1"),
        ("bert", {"intermediate_size": 41}, "has shape"),
        ("bert", tiny.CASES["bert_score"], "2 tensors missing, the first is classifier.bias"),
    ],
)
def test_files_that_do_not_fit(name, changes, message, tmp_path):
    source = directory_source(tiny.write(name, tmp_path, **changes))
    with pytest.raises(WeightError, match=message):
        load_encoder(source, encoder_from_hf(source.config, None), "float32")
