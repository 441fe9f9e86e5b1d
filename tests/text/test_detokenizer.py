"""Streams of text: nothing lost, nothing twice, stops at the right character whatever the token borders."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmjax.text.detokenizer import Detokenizer
from lmjax.text.stop import StopAutomaton
from lmjax.text.tokenizer import load_tokenizer
from lmjax.types import SamplingParams
from tests.fixtures import ALPHA, IM_END_ID, model_dir
from tests.text import toy_tokenizers

SCRIPT = [261 + i for i in range(len(ALPHA))]  # "Say " "ABC" "DEF" "GHI" "JKL" " end"


def run(tokenizer, ids, chunk=1, **params):
    """All text, the stop string and the tokens consumed, pushing ``chunk`` tokens at a time."""
    stream = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params))
    text, consumed, stop = "", 0, None
    for i in range(0, len(ids), chunk):
        result = stream.push(list(ids[i : i + chunk]))
        text += result.text
        consumed += result.consumed
        if result.stop is not None:
            stop = result.stop
            break
    return text + stream.flush(), stop, consumed


@given(data=st.data(), kind=st.sampled_from(list(toy_tokenizers.KINDS)))
@settings(max_examples=400, deadline=None)
def test_stream_is_decode(toys, data, kind):
    tokenizer = toys[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    flags = {name: data.draw(st.booleans()) for name in ("skip_special_tokens", "spaces_between_special_tokens")}
    chunk = data.draw(st.integers(1, 5))
    whole = tokenizer.decode(ids, **flags)
    assert run(tokenizer, ids, chunk, **flags) == (whole, None, len(ids))
    # with a stop string that never comes, the text is the same
    absent = next(char for char in map(chr, range(1, 99)) if char not in whole)
    assert run(tokenizer, ids, chunk, stop=[whole[-3:] + absent], **flags)[0] == whole


@given(data=st.data(), kind=st.sampled_from(list(toy_tokenizers.KINDS)))
@settings(max_examples=200, deadline=None)
def test_text_goes_on_from_the_prompt(toys, data, kind):
    tokenizer = toys[kind]
    one = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i not in tokenizer.special_ids)
    prompt = data.draw(st.lists(one, min_size=1, max_size=12))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12))
    whole, head = tokenizer.decode(prompt + ids, True), tokenizer.decode(prompt, True)
    stream = Detokenizer(tokenizer, SamplingParams(), after=prompt)
    text = stream.push(ids).text + stream.flush()
    if not head.endswith("\ufffd"):  # the prompt ends with a whole character
        assert text == whole[len(head) :]
    assert whole.endswith(text)


def test_first_space_and_cut_character_after_a_prompt(toys):
    tokenizer = toys["sentencepiece_like"]
    hello = tokenizer.token_id("▁Hello")
    assert Detokenizer(tokenizer, SamplingParams()).push([hello]).text == "Hello"
    assert Detokenizer(tokenizer, SamplingParams(), after=[hello]).push([hello]).text == " Hello"
    assert Detokenizer(tokenizer, SamplingParams(), after=[tokenizer.bos_token_id]).push([hello]).text == "Hello"
    cut = toys["byte_level"].encode("世")
    assert Detokenizer(toys["byte_level"], SamplingParams(), after=cut[:1]).push(cut[1:]).text == "世"


def first_end(text, stops):
    """By its definition: the stop string whose last character comes first; the longest of those."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return min(ends, default=None)


@given(
    text=st.text("abc", max_size=60),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=8),
    cuts=st.integers(0, 2**32),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_stops_against_their_definition(alpha, text, stops, cuts, include):
    ids = alpha.encode(text)
    chunk = 1 + cuts % 4
    found = run(alpha, ids, chunk, stop=stops, include_stop_str_in_output=include)
    expected = first_end(text, stops)
    if expected is None:
        assert found == (text, None, len(ids))
    else:
        end, _, stop = expected
        assert found == (text[: end if include else end - len(stop)], stop, end)


@given(text=st.text("ab", max_size=40), stops=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_than_may_become_a_stop(alpha, text, stops):
    stream = Detokenizer(alpha, SamplingParams(stop=stops))
    seen = shown = ""
    for token_id in alpha.encode(text):
        result = stream.push([token_id])
        if result.stop is not None:
            return
        seen += chr(token_id)
        shown += result.text
        held = max(n for n in range(len(seen) + 1) if n == 0 or any(s.startswith(seen[-n:]) for s in stops))
        assert shown == seen[: len(seen) - held]


def test_held_text_comes_at_the_end(alpha):
    """The stream ends while a prefix of a stop string is held."""
    stream = Detokenizer(alpha, SamplingParams(stop=["L endless"]))
    texts = [stream.push([i]).text for i in SCRIPT]
    assert "".join(texts) == "Say ABCDEFGHIJK"
    assert stream.flush() == "L end"
    assert run(alpha, SCRIPT[:5], stop=["KLM"]) == ("Say ABCDEFGHIJKL", None, 5)


def test_stop_over_token_borders(alpha):
    assert run(alpha, SCRIPT, stop=["CDEFG"]) == ("Say AB", "CDEFG", 4)
    assert run(alpha, SCRIPT, stop=["CDEFG"], include_stop_str_in_output=True) == ("Say ABCDEFG", "CDEFG", 4)
    assert run(alpha, SCRIPT, chunk=6, stop=["CDEFG"]) == ("Say AB", "CDEFG", 4)


def test_stop_inside_a_character_sequence():
    emoji = load_tokenizer(model_dir("EMOJI"))
    ids = [261 + i for i in range(5)]
    assert run(emoji, ids) == ("ok 😀 café 世🚀 end", None, 5)
    assert run(emoji, ids, stop=["é 世"]) == ("ok 😀 caf", "é 世", 4)
    assert emoji.decode(ids[:1]) == "ok \ufffd"  # cut in the middle of the character


def test_nothing_is_taken_after_a_stop(alpha):
    stream = Detokenizer(alpha, SamplingParams(stop=["B"]))
    assert stream.push(SCRIPT[:3]).consumed == 2
    assert stream.push(SCRIPT[3:]).consumed == 0
    assert stream.flush() == ""


def test_special_tokens_match_only_when_shown(alpha):
    ids = [72, IM_END_ID, 73]
    assert run(alpha, ids, stop=["<|im_end|>"]) == ("HI", None, 3)
    assert run(alpha, ids, stop=["<|im_end|>"], skip_special_tokens=False) == ("H", "<|im_end|>", 2)


def test_min_tokens(alpha):
    ids = alpha.encode("xaxaxa")
    assert run(alpha, ids, stop=["xa"], min_tokens=0) == ("", "xa", 2)
    assert run(alpha, ids, stop=["xa"], min_tokens=2) == ("xa", "xa", 4)
    # begun inside the first tokens, completed after them
    assert run(alpha, ids, stop=["xa"], min_tokens=3) == ("xa", "xa", 4)
    assert run(alpha, ids, stop=["xa"], min_tokens=6) == ("xaxaxa", None, 6)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    least=st.integers(0, 12),
)
@settings(max_examples=300, deadline=None)
def test_min_tokens_against_its_definition(alpha, text, stops, least):
    ends = [(i + len(s), -len(s), s) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    expected = min((end for end in ends if end[0] > least), default=None)
    found = run(alpha, alpha.encode(text), stop=stops, min_tokens=least)
    if expected is None:
        assert found == (text, None, len(text))
    else:
        end, _, stop = expected
        assert found == (text[: end - len(stop)], stop, end)


def test_choices_share_an_automaton(alpha):
    params = SamplingParams(stop=["DE", "zz"])
    automaton = StopAutomaton(params.stop)
    streams = [Detokenizer(alpha, params, automaton) for _ in range(3)]
    assert [s.push(SCRIPT).stop for s in streams] == ["DE"] * 3


def seconds(tokenizer, ids, **params):
    """CPU time, the best of some."""
    best = float("inf")
    for _ in range(4):
        stream = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params))
        start = time.process_time()
        for token_id in ids:
            stream.push([token_id])
        stream.flush()
        best = min(best, time.process_time() - start)
    return best


def test_cost_is_linear_in_tokens_and_not_in_stops(alpha):
    """Ratios, with room for a busy machine: quadratic cost would be 400 times, a scan of each stop 64 times."""
    rng = random.Random(0)
    ids = [rng.choice(SCRIPT) for _ in range(40_000)]
    stops = ["".join(rng.choices("ABCDEFGHIJKL", k=30)) + str(i) for i in range(64)]
    assert seconds(alpha, ids) < 100 * seconds(alpha, ids[:2000]) + 0.1
    assert seconds(alpha, ids, stop=stops) < 30 * seconds(alpha, ids) + 0.1


@pytest.mark.parametrize("stop", ["a" * 4094 + "b", "ab" * 2047, "aab" * 1365])
def test_nasty_stops(alpha, stop):
    """Text that always is a prefix of the stop strings: bounded work, all text out."""
    stops = [stop[i:] for i in range(64)]
    text = stop[:-1] * 2
    start = time.thread_time()
    found = run(alpha, alpha.encode(text), stop=[s + "!" for s in stops])
    assert found[0] == text
    assert time.thread_time() - start < 4  # of this thread: a worker has others
