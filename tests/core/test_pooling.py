"""Requests whose hidden states are wanted and nothing else: each is summed once, whatever happens to their slots."""

import pytest

from tests.core.test_renewal import driver
from tests.core.test_scheduler import prompt, run
from tests.fakes import fake_info, request

KINDS = ("last", "mean", "cls")


def pooled(handle, ids, kind, **rest):
    return request(handle, ids, max_tokens=1, pooling=kind, **rest)


def expected(ids, kind, weights=0):
    """The sum of the fake's hidden states (1, position, token, weights)."""
    n = len(ids)
    picked = {"last": [n - 1], "mean": range(n), "cls": [0]}[kind]
    return [len(picked), sum(picked), sum(int(ids[i]) for i in picked), weights * len(picked)]


def check(answer, ids, kind, weights=0):
    assert answer.pooled == expected(ids, kind, weights)
    assert answer.token_ids == [] and answer.reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_in_chunks_and_up_to_the_whole_context(kind, overlap, length):
    """Three equal prompts: the second and the third find blocks of the first, and a mean still has every token."""
    ids = prompt(length)
    info = fake_info(token_buckets=(8, 16), max_model_len=length)
    answers, scheduler = run([pooled(i, ids, kind) for i in range(3)], info, overlap=overlap, arrivals={2: 40})
    for answer in answers.values():
        check(answer, ids, kind)
    stats = scheduler.stats()
    assert stats.num_running == 0 and stats.kv_usage == 0
    if length == 100:
        assert (answers[2].num_cached > 0) == (kind == "last")


@pytest.mark.parametrize("host", [None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_answers_and_through_preemption(kind, host):
    info = fake_info(num_blocks=14, token_buckets=(8, 16), host=host)
    crowd = [request(i, prompt(30, i), max_tokens=80) for i in range(2)]
    texts = {5 + i: prompt(101, 5 + i) for i in range(4)}
    arrivals = dict.fromkeys(texts, 8)
    answers, scheduler = run(
        crowd + [pooled(handle, ids, kind, priority=9) for handle, ids in texts.items()],
        info,
        arrivals=arrivals,
        scheduling_policy="priority",
    )
    assert scheduler.stats().preemptions >= 1 or kind == "cls"
    for handle, ids in texts.items():
        check(answers[handle], ids, kind)
    alone, _ = run(crowd)
    for handle in alone:
        assert answers[handle].token_ids == alone[handle].token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_weights_that_change_with_recompute(kind, steps):
    """A mean in the middle of its prompt begins anew: all of it is of the new weights."""
    made = driver(max_num_seqs=4)
    texts = {i: prompt(50, i) for i in range(2)}
    for handle, ids in texts.items():
        made.add(pooled(handle, ids, kind))
    for _ in range(steps):
        made.step()
    made.change_weights(recompute=True)
    made.run()
    for handle, ids in texts.items():
        answer = made.answers[handle]
        assert answer.pooled in (expected(ids, kind, 0), expected(ids, kind, 1)) and answer.reason == "stop"
    if kind == "mean":
        assert made.answers[1].pooled == expected(texts[1], kind, 1)


def test_what_never_fits():
    info = fake_info(max_model_len=40)
    answers, _ = run([pooled(0, prompt(41), "mean"), pooled(1, prompt(40), "mean")], info)
    assert answers[0].reason == "error" and answers[0].message == "the prompt has 41 tokens, the context 40"
    check(answers[1], prompt(40), "mean")
