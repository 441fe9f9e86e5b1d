import subprocess
import sys

import numpy as np
import pytest

from lmjax.sampling import params as P
from lmjax.types import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS, ParameterError
from tests.sampling.reference import make_load


@pytest.mark.parametrize(
    ("level", "kwargs"),
    [
        (0, {"temperature": 0.0}),
        (0, {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}),
        (1, {}),
        (1, {"top_k": -1, "logit_bias": {}, "min_tokens": 3}),
        (2, {"top_k": 1}),
        (2, {"top_p": 0.99}),
        (2, {"min_p": 0.01}),
        (3, {"temperature": 0.0, "presence_penalty": -0.5}),
        (3, {"frequency_penalty": 0.5}),
        (3, {"repetition_penalty": 1.01}),
        (3, {"logit_bias": {3: 0.0}}),
        (3, {"allowed_token_ids": [1]}),
        (3, {"bad": [[1, 2]]}),
        (3, {"min_tokens": 1, "stop_ids": (2,)}),
    ],
)
def test_feature_level(level, kwargs):
    load = make_load(**kwargs)
    assert P.feature_level(load) == level
    assert P.needs_slot_state(load) == (level == 3)


def fields(load):
    row = P.encode_params(load)
    assert row.dtype == np.int32 and row.shape == (P.NUM_PARAMS,)
    types = {"i": np.int32, "f": np.float32, "I": np.uint32}
    return {name: row[i : i + 1].view(types[kind])[0] for i, (name, kind) in enumerate(P.FIELDS)}


def test_encode_params():
    got = fields(
        make_load(history=[1, 2, 3], seed=-2, index=5, temperature=0.5, top_k=7, top_p=0.25, min_p=0.5, min_tokens=4)
    )
    assert got["inv_temperature"] == 2.0 and got["top_k"] == 7 and got["top_p"] == 0.25
    assert got["min_p_gap"] == np.float32(0.5 * np.log(0.5))
    assert (got["seed_low"], got["seed_high"], got["sample_index"]) == (0xFFFFFFFE, 0xFFFFFFFF, 5)
    assert got["prompt_len"] == 3 and got["min_until"] == 7


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63, 2**64 - 1, 0x123456789ABCDEF])
def test_seed_is_64_bits(seed):
    got = fields(make_load(seed=seed))
    assert int(got["seed_high"]) << 32 | int(got["seed_low"]) == seed % 2**64


def test_extreme_numbers_stay_finite():
    got = fields(make_load(temperature=1e-300, top_p=1e-300, min_p=1e-300, top_k=2**40, min_tokens=10, max_tokens=None))
    assert np.isfinite(got["inv_temperature"]) and 0 < got["top_p"] < 1
    assert np.isfinite(got["min_p_gap"]) and got["top_k"] == 2**31 - 1
    assert np.isfinite(fields(make_load(temperature=1e6, min_p=1e-300))["min_p_gap"])


@pytest.mark.parametrize("vocab", [5, 32, 33, 200])
def test_masks(vocab):
    load = make_load(allowed_token_ids=[0, 3, vocab - 1], min_tokens=1, stop_ids=(3, vocab + 9))
    row = P.encode_state(load, vocab)
    assert row.dtype == np.int32 and row.shape == (P.state_row_size(vocab),)
    words = P.num_mask_words(vocab)

    def ids(mask):
        return [t for t in range(words * 32) if (int(mask[t // 32]) >> (t % 32)) & 1]

    assert ids(row[:words]) == [0, 3, vocab - 1]
    assert ids(row[words : 2 * words]) == [0, vocab - 1]
    unlimited = P.encode_state(make_load(logit_bias={1: 2.0}), vocab)
    assert ids(unlimited[:words]) == list(range(vocab))


def test_allowed_ids_win_over_min_tokens():
    row = P.encode_state(make_load(allowed_token_ids=[3], min_tokens=2, stop_ids=(3,)), 64)
    assert (row[:2] == row[2:4]).all() and row[0] == 8


def test_lists():
    vocab = 64
    load = make_load(logit_bias={5: -1.5, 2: 100.0}, bad=[[9], [1, 2, 3]])
    row = P.encode_state(load, vocab)[2 * P.num_mask_words(vocab) :]
    ids, values, words = np.split(row, [MAX_LOGIT_BIAS, 2 * MAX_LOGIT_BIAS])
    assert ids[:3].tolist() == [5, 2, -1] and values.view(np.float32)[:3].tolist() == [-1.5, 100.0, 0.0]
    words = words.reshape(-1, MAX_BAD_WORD_TOKENS)
    assert words[0, -2:].tolist() == [-1, 9] and words[1, -4:].tolist() == [-1, 1, 2, 3] and (words[2:] == -1).all()
    got = fields(load)
    assert got["num_bias"] == 2 and got["num_bad_words"] == 2


def test_full_lists_fit():
    bias = {i: float(i % 100) for i in range(MAX_LOGIT_BIAS)}
    load = make_load(logit_bias=bias, bad=[[i] * MAX_BAD_WORD_TOKENS for i in range(P.MAX_BAD_SEQUENCES)])
    assert P.encode_state(load, 2000).shape == (P.state_row_size(2000),)


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [
        ("allowed_token_ids", {"allowed_token_ids": [1, 64]}),
        ("logit_bias", {"logit_bias": {64: 1.0}}),
        ("bad_words", {"bad": [[1] * (MAX_BAD_WORD_TOKENS + 1)]}),
        ("bad_words", {"bad": [[]]}),
        ("bad_words", {"bad": [[1]] * (P.MAX_BAD_SEQUENCES + 1)}),
    ],
)
def test_errors_name_the_field(field, kwargs):
    with pytest.raises(ParameterError) as error:
        P.encode_state(make_load(**kwargs), 64)
    assert error.value.field == field


def test_imports_no_jax():
    code = "import sys, lmjax.sampling.params; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
