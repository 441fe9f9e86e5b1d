"""What crosses the channel arrives as it was sent."""

import msgspec
import numpy as np
import pytest

from lmjax.core.output import FinishedEvent, LogprobOutput, PromptLogprobOutput, StartedEvent, StepOutput
from lmjax.engine.columns import new_request, step_record
from lmjax.engine.records import (
    AbortRequest,
    AddRequest,
    Dead,
    Finished,
    Inbound,
    Outbound,
    Progress,
    Ready,
    Shutdown,
    Started,
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
    ):
        assert through(message, Outbound) == message


def test_step_record_keeps_every_column():
    rng = np.random.default_rng(0)
    top_ids, top_logprobs = rng.integers(0, 99, (2, 5), np.int32), rng.normal(size=(2, 5)).astype(np.float32)
    output = StepOutput(
        handles=np.array([5, 2**40, 7]),
        token_ids=np.array([1, 2, 3], np.int32),
        logprobs=LogprobOutput(
            np.array([0, 2], np.int32),
            np.array([-1, -2], np.float32),
            np.array([1, 9], np.int32),
            3,
            top_ids[:, :3],  # a view with gaps, as the core gives it
            top_logprobs[:, :3],
        ),
        prompt_logprobs=[
            PromptLogprobOutput(
                7,
                4,
                np.array([-3], np.float32),
                np.array([2], np.int32),
                2,
                np.array([[8, 9]], np.int32),
                np.array([[-1, -4]], np.float32),
            )
        ],
        started=[StartedEvent(5, 16, 2.5)],
        finished=[FinishedEvent(7, "stop", 3), FinishedEvent(9, "error", None, "full", True)],
    )
    record = through(step_record(output), Outbound)
    assert np.frombuffer(record.handles, "<i8").tolist() == [5, 2**40, 7]
    assert np.frombuffer(record.token_ids, "<i4").tolist() == [1, 2, 3]
    assert np.frombuffer(record.logprobs.rows, "<i4").tolist() == [0, 2]
    assert np.frombuffer(record.logprobs.top_ids, "<i4").tolist() == top_ids[:, :3].ravel().tolist()
    assert np.frombuffer(record.logprobs.top_logprobs, "<f4").tolist() == top_logprobs[:, :3].ravel().tolist()
    assert np.frombuffer(record.prompt_logprobs[0].top_ids, "<i4").tolist() == [8, 9]
    assert (record.prompt_logprobs[0].handle, record.prompt_logprobs[0].first) == (7, 4)
    assert record.started == [Started(5, 16, 2.5)]
    assert record.finished == [Finished(7, "stop", 3), Finished(9, "error", None, "full", True)]


def test_nothing_to_tell_is_no_record():
    empty = StepOutput(np.zeros(0, np.int64), np.zeros(0, np.int32))
    assert step_record(None) is None and step_record(empty) is None
    empty.finished.append(FinishedEvent(1, "abort"))
    assert step_record(empty).finished == [Finished(1, "abort")]
