"""Log-probabilities of given tokens: those of the prompt and of one token after it."""

import pytest

from tests.core.test_scheduler import prompt, run
from tests.fakes import fake_info, request


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_a_token_after_the_prompt_is_a_target_too(length):
    """In chunks, up to the context length: the same numbers as in a prompt that holds the token."""
    ids = prompt(length + 1)
    info = fake_info(token_buckets=(8, 16), max_model_len=length + 1)
    answers, _ = run(
        [request(i, ids[:-1], max_tokens=1, prompt_logprobs=1, after=int(ids[-1])) for i in range(3)], info
    )
    expected, _ = run([request(0, ids, max_tokens=1, prompt_logprobs=1)])
    assert sorted(expected[0].prompt_logprobs) == list(range(1, length + 1))
    for i in range(3):
        assert answers[i].prompt_logprobs == expected[0].prompt_logprobs and len(answers[i].token_ids) == 1


def test_scored_tokens_survive_preemption():
    info = fake_info(num_blocks=14, token_buckets=(8, 16))
    crowd = [request(i, prompt(30, i), max_tokens=80) for i in range(2)]
    texts = [prompt(101, 5 + i) for i in range(4)]
    scored = [
        request(5 + i, ids[:-1], max_tokens=1, prompt_logprobs=1, after=int(ids[-1]), priority=9)
        for i, ids in enumerate(texts)
    ]
    arrivals = {request.handle: 8 for request in scored}
    answers, scheduler = run(crowd + scored, info, arrivals=arrivals, scheduling_policy="priority")
    assert scheduler.stats().preemptions >= 1
    expected, _ = run([request(5 + i, ids, max_tokens=1, prompt_logprobs=1) for i, ids in enumerate(texts)])
    for handle, answer in expected.items():
        assert answers[handle].prompt_logprobs == answer.prompt_logprobs and len(answer.prompt_logprobs) == 100
