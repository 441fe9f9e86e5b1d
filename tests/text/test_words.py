import pytest

from lmjax.text.words import bad_words_ids
from lmjax.types import ParameterError


def test_with_and_without_the_space(toys):
    tokenizer = toys["byte_level"]
    hello, spaced = tokenizer.encode("Hello"), tokenizer.encode(" Hello")
    # the space is a token of its own here, so one sequence covers both
    assert bad_words_ids(tokenizer, ["Hello"]) == [hello] and len(spaced) == len(hello) + 1


def test_a_word_that_differs_behind_a_space(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from lmjax.text.tokenizer import Tokenizer as Ours
    from lmjax.text.tokenizer import TokenizerSettings

    backend = Tokenizer(models.WordLevel({"cat": 0, "Ġcat": 1, "Ġ": 2}, unk_token="Ġ"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Ours(backend, TokenizerSettings("test"))
    assert bad_words_ids(tokenizer, ["cat", "  cat"]) == [[0], [1]]


def test_limits(alpha):
    assert bad_words_ids(alpha, ["x" * 16]) == [[120] * 16]
    with pytest.raises(ParameterError, match=r"bad_words: 'x+' has 17 tokens, at most 16"):
        bad_words_ids(alpha, ["x" * 17])
    with pytest.raises(ParameterError, match="no tokens"):
        bad_words_ids(alpha, ["ok", "  "])
    assert bad_words_ids(alpha, ["\ud83d"]) == [list("\ufffd".encode())]
