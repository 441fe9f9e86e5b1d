"""What can never run is refused with the field's name, the value and the limit."""

import pytest

from lmjax.engine.validate import check_request
from lmjax.protocol import EngineInfo
from lmjax.text.tokenizer import load_tokenizer
from lmjax.types import ParameterError, SamplingParams
from tests.fixtures import EOS_ID, IM_END_ID, model_dir

INFO = EngineInfo("m", "llama", 64, 512, 4, 16, 3, 8, "float32", "cpu", 1, (EOS_ID, IM_END_ID))  # 3 blocks of 16


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_dir("ALPHA"))


@pytest.fixture
def check(tokenizer):
    return lambda prompt, info=INFO, **params: check_request(prompt, SamplingParams(**params), info, tokenizer)


def big(**changes):
    return EngineInfo("m", "llama", 64, 512, 4, 16, 100, 8, "float32", "cpu", 1, **changes)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt: is empty"),
        ([1, 512], {}, "prompt: got the token id 512, must be at least 0 and below 512"),
        ([-1], {}, "prompt: got the token id -1"),
        ([2**63], {}, "prompt: got the token id 9223372036854775808"),
        ([2**70], {}, "prompt: must be a list of token ids"),
        ([1.5], {}, "prompt: must be a list of token ids"),
        (["a"], {}, "prompt: must be a list of token ids"),
        ([[1], [2, 3]], {}, "prompt: must be a list of token ids"),
        ([1] * 64, {}, "prompt: has 64 tokens.* 64 tokens.* at most 63"),
        ([1] * 60, {"max_tokens": 5}, r"max_tokens: .* 64 tokens, but 65 were asked for \(60 in the prompt, 5 to"),
        ([1], {"logprobs": 5}, "^logprobs: got 5, must be at most 4"),
        ([1], {"prompt_logprobs": 5}, "^prompt_logprobs: got 5, must be at most 4"),
        ([1], {"stop_token_ids": [512]}, "stop_token_ids: got the token id 512"),
        ([1], {"allowed_token_ids": [3, 600]}, "allowed_token_ids: got the token id 600"),
        ([1], {"logit_bias": {512: 1.0}}, "logit_bias: got the token id 512"),
        ([1], {"bad_words": ["x" * 40]}, "bad_words: .*40 tokens, at most 16"),
        ([1] * 60, {"max_tokens": None, "min_tokens": 5}, r"min_tokens: got 5, must be at most max_tokens \(4\)"),
    ],
)
def test_refusals(check, prompt, params, message):
    with pytest.raises(ParameterError, match=message) as error:
        check(prompt, big(), **params)
    assert error.value.field in message


def test_what_never_fits_in_the_cache(check):
    with pytest.raises(ParameterError, match="prompt: has 49 tokens, more than the whole KV cache holds"):
        check([1] * 49)
    with pytest.raises(ParameterError, match="max_tokens: the KV cache holds 48 tokens, but 50 were"):
        check([1] * 40, max_tokens=10)
    assert check([1] * 40, max_tokens=9).params.max_tokens == 9  # the last token is never written
    assert check([1] * 40, max_tokens=None).params.max_tokens == 9


def test_max_tokens_is_the_rest_of_the_context(check):
    assert check([1] * 10, big(), max_tokens=None).params.max_tokens == 54
    assert check([1] * 63, big(), max_tokens=1).params.max_tokens == 1


@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"), [(3, 5, 3), (100, 5, 90), (-1, 5, 59), (-1, None, 63), (-1, 64, 1)]
)
def test_truncation_keeps_the_last_tokens(check, keep, max_tokens, expected):
    prompt = list(range(90))
    if expected == 90 or max_tokens == 64:
        with pytest.raises(ParameterError):
            check(prompt, big(), truncate_prompt_tokens=keep, max_tokens=max_tokens)
        return
    checked = check(prompt, big(), truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert checked.prompt == prompt[-expected:] and checked.params.truncate_prompt_tokens is None


def test_a_checked_request_checks_again_to_itself(check, tokenizer):
    first = check(list(range(90)), big(), truncate_prompt_tokens=-1, max_tokens=4, bad_words=["end"], logprobs=4)
    again = check_request(first.prompt, first.params, big(), tokenizer)
    assert again == first


def test_stop_ids_and_bad_words(check, tokenizer):
    checked = check([1], stop_token_ids=[5, EOS_ID, 5], bad_words=["ab"])
    assert checked.stop_ids == (EOS_ID, IM_END_ID, 5)
    assert [ord("a"), ord("b")] in checked.bad_words_ids
    assert check([1], stop_token_ids=[5], ignore_eos=True).stop_ids == (5,)
