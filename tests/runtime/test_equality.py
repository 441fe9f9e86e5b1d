"""One answer: what a request gets on the real device does not depend on batching, chunks, prefix hits, preemption,
overlap. A difference counts unless the two tokens are less than 1e-4 apart in the reference."""

import numpy as np
import pytest

from lmjax.core.plan import SlotLoad
from lmjax.core.request import NewRequest
from lmjax.core.scheduler import request_seed
from lmjax.sampling.params import FULL, GREEDY, feature_level
from tests.fakes import Answer, run_requests
from tests.runtime.reference import NumpyLlama
from tests.runtime.requests import Limited, random_requests, scheduler_config
from tests.runtime.tiny import tiny_executor, tiny_model
from tests.sampling.reference import check_draw

NUM_REQUESTS = 200
GAP = 1e-4
MOST_TIES = 2


@pytest.fixture(scope="module")
def requests() -> list[NewRequest]:
    return random_requests(NUM_REQUESTS)


@pytest.fixture(scope="module")
def alone(requests) -> dict[int, Answer]:
    answers = {}
    for one in requests:
        executor = Limited(tiny_executor())
        found, _ = run_requests(
            [one], scheduler_config(enable_prefix_caching=False), executor.info, executor, overlap=False
        )
        answers.update(found)
    return answers


def level_of(request: NewRequest) -> int:
    n = len(request.prompt)
    return feature_level(SlotLoad(0, request.params, 0, 0, request.prompt, n, request.stop_ids, request.bad_words_ids))


def is_tie(request: NewRequest, index: int, expected: list[int], got: list[int]) -> bool:
    """Whether the first difference is between two tokens that the reference can hardly tell apart: their logits, or
    where one is drawn at random the bounds of their shares. ``index``: which of the request's choices."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if at is None:
        return False
    history = np.array([*request.prompt.tolist(), *expected[:at]], np.int32)
    logits = NumpyLlama(tiny_model()).logits(history.tolist())[-1]
    seed = request.params.seed
    seed = request_seed(0, request.handle) if seed is None else seed
    load = SlotLoad(
        0, request.params, seed, index, history, len(request.prompt), request.stop_ids, request.bad_words_ids
    )
    if request.params.temperature > 0:
        return all(could_be_drawn(logits, load, token) for token in (expected[at], got[at]))
    # with changed logits there is no excuse
    return feature_level(load) < FULL and bool(abs(logits[expected[at]] - logits[got[at]]) < GAP)


def could_be_drawn(logits: np.ndarray, load: SlotLoad, token: int) -> bool:
    try:
        check_draw(logits, load, token, tolerance=GAP / 10)
    except AssertionError:
        return False
    return True


def check_equal(requests: list[NewRequest], expected: dict[int, Answer], got: dict[int, Answer]) -> None:
    ties = []
    for request in requests:
        for index in range(request.params.n):
            handle = request.handle + index
            want, have = expected[handle], got[handle]
            if have.token_ids != want.token_ids and is_tie(request, index, want.token_ids, have.token_ids):
                ties.append(handle)
                continue
            assert have.token_ids == want.token_ids, f"handle {handle}: {request.params}"
            assert (have.reason, have.stop_reason) == (want.reason, want.stop_reason)
            assert len(have.logprobs) == len(want.logprobs)
            np.testing.assert_allclose([p[0] for p in have.logprobs], [p[0] for p in want.logprobs], atol=1e-4)
            assert have.prompt_logprobs.keys() == want.prompt_logprobs.keys()
            for position, (logprob, _) in want.prompt_logprobs.items():
                assert abs(have.prompt_logprobs[position][0] - logprob) < 1e-4
    print(f"ties: {ties}")
    assert len(ties) <= MOST_TIES


WAYS = {
    "together": ({}, {}),
    "chunks of 8": ({"max_num_batched_tokens": 8}, {}),
    "long prompts in chunks of 5": ({"long_prefill_token_threshold": 5}, {}),
    "prefix cache off": ({"enable_prefix_caching": False}, {}),
    "small pool": ({}, {"num_blocks": 26}),
    "small pool, prefix cache off": ({"enable_prefix_caching": False}, {"num_blocks": 26}),
    "three slots, buffers overwritten": ({}, {"max_num_seqs": 3, "mutate": True}),
}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("way", WAYS)
def test_same_answers(requests, alone, way, overlap):
    changes, limits = WAYS[way]
    executor = Limited(tiny_executor(), **limits)
    rng = np.random.default_rng(5)
    arrivals = {r.handle: int(rng.integers(0, 300)) for r in requests}
    got, scheduler = run_requests(
        requests, scheduler_config(**changes), executor.info, executor, overlap=overlap, arrivals=arrivals
    )
    check_equal(requests, alone, got)
    stats = scheduler.stats()
    if "num_blocks" in limits:
        assert stats.preemptions >= 30
    if changes.get("enable_prefix_caching", True):
        assert stats.prefix_hits > 0


def test_the_comparison_can_fail(requests, alone):
    """The reference tells apart what differs, and excuses a tie only."""
    greedy = next(r for r in requests if r.params.temperature == 0 and len(alone[r.handle].token_ids) > 3)
    drawn = next(r for r in requests if r.params.temperature > 0 and len(alone[r.handle].token_ids) > 3)
    for request in (greedy, drawn):
        wrong = {**alone, request.handle: Answer(token_ids=[*alone[request.handle].token_ids[:-1], 299])}
        with pytest.raises(AssertionError, match=f"handle {request.handle}"):
            check_equal(requests, alone, wrong)


def test_greedy_answers_are_the_references(requests, alone):
    """The float64 model, alone and dense, picks the same tokens."""
    reference, checked = NumpyLlama(tiny_model()), 0
    for request in requests:
        if level_of(request) != GREEDY:
            continue
        tokens = alone[request.handle].token_ids
        logits = reference.logits([*request.prompt.tolist(), *tokens])[len(request.prompt) - 1 : -1]
        chosen = logits[np.arange(len(tokens)), tokens]
        assert (logits.max(-1) - chosen < GAP).all()
        checked += len(tokens)
    assert checked > 200
