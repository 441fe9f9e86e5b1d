"""Records to updates: text, stop strings, log-probabilities, choices, merging. No engine is needed."""

import time

import numpy as np
import pytest

from lmjax.core.output import Finished, PromptRows, Started
from lmjax.core.plan import TokenColumns, pack_rows, row_width
from lmjax.engine.output import OutputProcessor
from lmjax.engine.records import StepRecord
from lmjax.text.tokenizer import load_tokenizer
from lmjax.types import EngineDeadError, QueueFullError, SamplingParams
from tests.fixtures import EOS_ID, FIRST_PIECE, model_dir

SAY, ABC, DEF, GHI, JKL, END = range(FIRST_PIECE, FIRST_PIECE + 6)  # "Say " "ABC" "DEF" "GHI" "JKL" " end"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_dir("ALPHA"))


@pytest.fixture
def outputs(tokenizer):
    return OutputProcessor(tokenizer, [EOS_ID])


def opened(outputs, prompt=(1, 2, 3), **params):
    return outputs.open("r", list(prompt), SamplingParams(**params), 0.0)


def record(*tokens, finished=(), k=None, **columns):
    """``tokens``: pairs (handle, token id). With ``k``: row i has log-probability -i - 1, rank i + 1, top ids 0 .."""
    ids = np.array([token for _, token in tokens])
    return StepRecord(
        handles=np.array([handle for handle, _ in tokens], "<i8").tobytes(),
        width=row_width(k),
        rows=token_rows(ids, -1 - np.arange(len(ids)), 1 + np.arange(len(ids)), k or 0)[:, : row_width(k)].tobytes(),
        finished=list(finished),
        **columns,
    )


def token_rows(ids, logprobs, ranks, k):
    n = len(ids)
    return pack_rows(TokenColumns(ids, logprobs, ranks, np.tile(np.arange(k), (n, 1)), np.full((n, k), -0.5)))


def test_tokens_become_text_and_the_stop_token_does_not(outputs):
    request = opened(outputs)
    touched, aborts = outputs.process(record((request.handle, SAY), started=[Started(request.handle, 2, 5.0)]))
    assert touched == [request] and aborts == []
    update = request.take()
    assert [(d.index, d.text, d.token_ids, d.finish_reason) for d in update.deltas] == [(0, "Say ", [SAY], None)]
    assert (update.num_prompt_tokens, update.num_cached_tokens, update.finished) == (3, 2, False)
    assert update.metrics.scheduled == 5.0 and update.metrics.first_token > 0
    outputs.process(record((request.handle, EOS_ID), finished=[Finished(request.handle, "stop", EOS_ID)]))
    update = request.take()
    [delta] = update.deltas
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("", [EOS_ID], "stop", None)
    assert update.finished and request.finished and len(outputs) == 0
    assert outputs.close(request) == []


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "DEF")])
def test_stop_token(outputs, include, text):
    request = opened(outputs, stop_token_ids=[DEF], include_stop_str_in_output=include)
    outputs.process(record((request.handle, DEF), finished=[Finished(request.handle, "stop", DEF)]))
    [delta] = request.take().deltas
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == (text, [DEF], "stop", DEF)


@pytest.mark.parametrize(("include", "text"), [(False, "Say AB"), (True, "Say ABCD")])
def test_a_stop_string_across_tokens_ends_the_choice_here(outputs, include, text):
    request = opened(outputs, stop=["CD"], include_stop_str_in_output=include, logprobs=1)
    updates, aborted = [], []
    for token in (SAY, ABC, DEF, GHI):  # the engine runs one step ahead of us
        touched, aborts = outputs.process(record((request.handle, token), k=3))
        aborted += aborts
        updates += [r.take() for r in touched]
    assert aborted == [request.handle] and len(updates) == 3  # GHI came too late and touched nobody
    deltas = [update.deltas[0] for update in updates]
    assert "".join(d.text for d in deltas) == text
    assert [token for d in deltas for token in d.token_ids] == [SAY, ABC, DEF]
    assert [len(d.logprobs) for d in deltas] == [1, 1, 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "CD")
    assert updates[-1].finished


def test_tokens_behind_a_stop_string_in_one_record_are_dropped(outputs):
    request = opened(outputs, stop=["CD"], logprobs=0)
    tokens = [(request.handle, token) for token in (SAY, ABC, DEF, GHI)]
    end = Finished(request.handle, "length")
    _, aborts = outputs.process(record(*tokens, finished=[end], k=2))
    [delta] = request.take().deltas
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("Say AB", [SAY, ABC, DEF], "stop")
    assert [entry.logprob for entry in delta.logprobs] == [-1, -2, -3]
    assert aborts == []  # the engine has ended it by itself


def test_held_text_comes_out_at_the_end(outputs):
    request = opened(outputs, stop=["CX"])
    outputs.process(record((request.handle, ABC)))
    assert request.take().deltas[0].text == "AB"
    outputs.process(record((request.handle, 0xC3), finished=[Finished(request.handle, "length")]))
    assert request.take().deltas[0].text == "C\ufffd"


def test_logprobs_only_for_those_who_asked_and_only_so_many(outputs):
    plain, one, three = opened(outputs), opened(outputs, logprobs=1), opened(outputs, logprobs=3)
    rows = [(r.handle, ABC) for r in (plain, one, three)]
    outputs.process(record(*rows, k=3))
    assert plain.take().deltas[0].logprobs is None
    [entry] = one.take().deltas[0].logprobs
    assert (entry.token_id, entry.logprob, entry.rank, entry.top_ids) == (ABC, -2, 2, (0,))
    [entry] = three.take().deltas[0].logprobs
    assert (entry.logprob, entry.rank, entry.top_ids, len(entry.top_logprobs)) == (-3, 3, (0, 1, 2), 3)


def prompt_columns(handle, first, n):
    positions = np.arange(first, first + n)
    return PromptRows(handle, first, row_width(1), token_rows(10 + positions, -positions, np.ones(n), 1).tobytes())


def test_prompt_logprobs_are_put_together_and_given_once(outputs):
    request = opened(outputs, prompt=[10, 11, 12, 13, 14], prompt_logprobs=0)
    handle = request.handle
    touched, _ = outputs.process(StepRecord(prompt_rows=[prompt_columns(handle, 1, 2)]))
    assert touched == []
    outputs.process(StepRecord(prompt_rows=[prompt_columns(handle, 1, 1)]))  # again, after a preemption
    outputs.process(record((handle, ABC), prompt_rows=[prompt_columns(handle, 3, 2)]))
    update = request.take()
    assert update.prompt_logprobs[0] is None
    assert [(e.token_id, e.logprob, e.top_ids) for e in update.prompt_logprobs[1:]] == [
        (11, -1, ()),
        (12, -2, ()),
        (13, -3, ()),
        (14, -4, ()),
    ]
    outputs.process(record((handle, ABC), prompt_rows=[prompt_columns(handle, 4, 1)]))
    assert request.take().prompt_logprobs is None


def test_prompt_logprobs_of_one_token(outputs):
    request = opened(outputs, prompt=[10], prompt_logprobs=2)
    outputs.process(record((request.handle, ABC)))
    assert request.take().prompt_logprobs == [None]


def test_choices_end_one_by_one(outputs):
    request = opened(outputs, n=3)
    a, b, c = request.handles
    outputs.process(record((a, ABC), (b, DEF), (c, GHI), finished=[Finished(b, "length")]))
    update = request.take()
    assert [(d.index, d.text, d.finish_reason) for d in update.deltas] == [
        (0, "ABC", None),
        (1, "DEF", "length"),
        (2, "GHI", None),
    ]
    assert not update.finished
    outputs.process(record((a, DEF), (c, DEF), finished=[Finished(c, "length")]))
    assert not request.take().finished
    assert outputs.close(request) == [a]


def test_updates_not_taken_are_merged(outputs):
    request = opened(outputs, n=2, logprobs=0)
    a, b = request.handles
    for token in (SAY, ABC, DEF):
        outputs.process(record((a, token), (b, token), k=0))
    outputs.process(record(finished=[Finished(a, "length"), Finished(b, "length")]))
    update = request.take()
    assert [(d.index, d.text, d.token_ids, len(d.logprobs), d.finish_reason) for d in update.deltas] == [
        (0, "Say ABCDEF", [SAY, ABC, DEF], 3, "length"),
        (1, "Say ABCDEF", [SAY, ABC, DEF], 3, "length"),
    ]
    assert update.finished and request.take() is None


def test_an_error_ends_all_choices(outputs):
    request = opened(outputs, n=2)
    a, b = request.handles
    _, aborts = outputs.process(record((b, ABC), finished=[Finished(a, "error", message="cannot fit")]))
    update = request.take()
    assert aborts == [b] and update.finished and update.error == "cannot fit"
    assert request.error is None and request.finished and len(outputs) == 0


def test_queue_full_is_raised_without_an_update(outputs):
    request = opened(outputs)
    outputs.process(StepRecord(finished=[Finished(request.handle, "error", message="full", queue_full=True)]))
    assert request.take() is None and isinstance(request.error, QueueFullError)


def test_a_dead_engine_fails_every_request_and_keeps_what_came(outputs):
    first, second = opened(outputs), opened(outputs, n=2)
    outputs.process(record((first.handle, ABC)))
    assert {id(r) for r in outputs.fail_all("killed")} == {id(first), id(second)}
    update = first.take()
    assert (update.deltas[0].text, update.error, update.finished) == ("ABC", "killed", True)
    assert second.take().error == "killed" and isinstance(second.error, EngineDeadError)
    assert outputs.process(record((first.handle, ABC))) == ([], [])


def test_handles_are_never_used_twice(outputs):
    seen = []
    for n in (1, 3, 2):
        request = opened(outputs, n=n)
        seen += request.handles
        outputs.close(request)
    assert len(set(seen)) == 6


def test_a_token_costs_microseconds(outputs):
    """About 3 us on one core; ten times that would be a loop over something that grows."""
    requests = [opened(outputs, max_tokens=10_000, stop=["zzz"]) for _ in range(256)]
    step = record(*((r.handle, ABC) for r in requests))
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for request in outputs.process(step)[0]:
            request.take()
        best = min(best, time.perf_counter() - begin)
    assert best / 256 < 30e-6
