from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmjax.types import SamplingParams
from lmjax.weights.errors import WeightError
from lmjax.weights.generation import eos_token_ids, sampling_defaults


def test_defaults_are_sampling_params():
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50.0,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 512,
        "do_sample": True,
        "num_beams": 1,
        "eos_token_id": 2,
    }
    found = sampling_defaults(config)
    assert found == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 512,
    }
    assert type(found["top_k"]) is int
    SamplingParams(**found)


def test_absent_and_null():
    assert sampling_defaults({}) == {}
    assert sampling_defaults({"temperature": None, "top_k": None}) == {}


@pytest.mark.parametrize(
    "config,word",
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": "x"}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"top_k": 1e30}, "top_k"),
    ],
)
def test_values_that_no_request_could_have(config, word):
    with pytest.raises(WeightError, match=rf"generation_config\.json: .*{word}"):
        sampling_defaults(config)


@pytest.mark.parametrize(
    "config,generation,want",
    [
        ({}, {}, ()),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": 0}, {"eos_token_id": [128001, 128009, 128001]}, (128001, 128009)),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 2}, {"eos_token_id": []}, ()),
    ],
)
def test_eos(config, generation, want):
    assert eos_token_ids(config, generation) == want


@pytest.mark.parametrize("value", ["</s>", [1, "2"], -1, True, 1.5])
def test_wrong_eos(value, tmp_path):
    for source, named in ((tmp_path, tmp_path / "config.json"), (Path("x.gguf"), "x.gguf")):
        with pytest.raises(WeightError, match=f"^{re.escape(str(named))}: eos_token_id"):
            eos_token_ids({"eos_token_id": value}, {}, source)
