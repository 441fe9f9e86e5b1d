"""What crosses the channel arrives as it was sent."""

import msgspec
import numpy as np
import pytest

from lmjax.core.output import Finished, PromptRows, Started, StepOutput, cut_rows
from lmjax.core.plan import TokenColumns, pack_rows, row_width
from lmjax.engine.columns import new_request, step_record
from lmjax.engine.records import (
    AbortRequest,
    AddRequest,
    Dead,
    Inbound,
    Outbound,
    Progress,
    Ready,
    Shutdown,
    StepRecord,
)
from lmjax.protocol import EngineInfo, EngineStats
from lmjax.types import SamplingParams

INFO = EngineInfo("m", "llama", 1024, 512, 20, 16, 64, 8, "float32", "cpu", 1, (258,), {"top_p": 0.9})


def through(message, kind):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, seed=-(2**63), logit_bias={7: -1.5}, stop=["é\n"], bad_words=["x"]),
        SamplingParams(seed=2**64 - 1, logprobs=0, prompt_logprobs=3, n=128, allowed_token_ids=[1, 2]),
    ],
)
def test_inbound(params):
    add = AddRequest(2**62, np.arange(5, dtype="<i4").tobytes(), params, (1, 2), [[3, 4]], -7, "salt", 1.25)
    assert through(add, Inbound) == add
    request = new_request(through(add, Inbound))
    assert request.prompt.tolist() == [0, 1, 2, 3, 4] and request.params == params
    assert (request.handle, request.stop_ids, request.bad_words_ids) == (2**62, (1, 2), [[3, 4]])
    assert (request.priority, request.cache_salt, request.arrival) == (-7, "salt", 1.25)
    for message in (AbortRequest([1, 2**62]), Shutdown()):
        assert through(message, Inbound) == message


def test_outbound():
    for message in (
        StepRecord(stats=EngineStats(num_running=3, iteration_tokens=[1, 2])),
        Progress("loading"),
        Ready(INFO),
        Dead("no", config=True),
        Dead("no", model=True),
    ):
        assert through(message, Outbound) == message


def test_step_record_keeps_every_column():
    rng = np.random.default_rng(0)
    rows = pack_rows(TokenColumns(np.arange(3), rng.normal(size=3), np.arange(3) + 1, *rng.normal(size=(2, 3, 5))))
    wanted, prompt = cut_rows(rows, 3), cut_rows(rows[:1], 2)
    output = StepOutput(
        np.array([5, 2**40, 7]).data,
        row_width(3),
        wanted.data,
        prompt_rows=[PromptRows(7, 4, row_width(2), prompt.data)],
        started=[Started(5, 16, 2.5)],
        finished=[Finished(7, "stop", 3), Finished(9, "error", None, "full", True)],
    )
    record = through(step_record(output), Outbound)
    assert np.frombuffer(record.handles, "<i8").tolist() == [5, 2**40, 7]
    assert np.frombuffer(record.rows, "<i4").reshape(3, record.width).tolist() == rows[:, :9].tolist()
    [found] = record.prompt_rows
    assert (found.handle, found.first, found.width) == (7, 4, 7)
    assert np.frombuffer(found.rows, "<i4").tolist() == rows[0, :7].tolist()
    assert record.started == [Started(5, 16, 2.5)]
    assert record.finished == [Finished(7, "stop", 3), Finished(9, "error", None, "full", True)]


def test_nothing_to_tell_is_no_record():
    empty = StepOutput(np.zeros(0, np.int64).data, 1, np.zeros((0, 1), np.int32).data, [], [], [])
    assert step_record(None) is None and step_record(empty) is None
    empty.finished.append(Finished(1, "abort"))
    assert through(step_record(empty), Outbound).finished == [Finished(1, "abort")]
