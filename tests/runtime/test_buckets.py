import pytest

from lmjax.runtime.buckets import GPU_SAMPLERS, Buckets, ForwardKey, SampleKey
from tests.runtime.tiny import make_plan


def plan_of(num_decode: int, *chunks: int, targets: bool = False):
    prefill = [(100 + i, 0, [7] * n, True) for i, n in enumerate(chunks)]
    wanted = [8] * sum(chunks) if targets else None
    return make_plan(decode=[(i, 5) for i in range(num_decode)], prefill=prefill, targets=wanted)


def test_cpu_default_has_at_most_nine_forward_programs():
    buckets = Buckets(64, 512)
    assert buckets.token_buckets == (1, 4, 8, 16, 32, 64, 128, 256, 512)
    assert buckets.row_buckets == (1, 4, 8, 16, 32, 64)
    assert all(key.num_rows == min(key.num_tokens, 64) for key in buckets.forward)


def test_gpu_default_reaches_all_rows_in_doubling_steps():
    buckets = Buckets(256, 2048)
    assert buckets.token_buckets == (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
    assert buckets.row_buckets[-1] == 256


@pytest.mark.parametrize(
    ("num_seqs", "budget", "tokens"),
    [
        (3, 100, (1, 3, 4, 8, 16, 32, 64, 100)),
        (1, 512, (1, 4, 8, 16, 32, 64, 128, 256, 512)),
        (64, 20, (1, 4, 8, 16, 20)),
        (100, 5000, (1, 4, 8, 16, 32, 64, 100, 128, 256, 512, 2048, 5000)),
        (8, 1, (1,)),
    ],
)
def test_limits_need_not_be_powers_of_two(num_seqs, budget, tokens):
    buckets = Buckets(num_seqs, budget)
    assert buckets.token_buckets == tokens
    assert buckets.row_buckets[-1] == min(num_seqs, budget)


@pytest.mark.parametrize(
    ("num_decode", "chunks", "key"),
    [
        (1, (), (1, 1)),
        (3, (), (4, 4)),
        (64, (), (64, 64)),
        (3, (2, 3), (8, 8)),
        (63, (2,), (128, 64)),
        (0, (129,), (256, 64)),
        (0, (257,), (512, 64)),
        (60, (400, 52), (512, 64)),
    ],
)
def test_choose_takes_the_smallest_that_fits(num_decode, chunks, key):
    assert Buckets(64, 512).choose(plan_of(num_decode, *chunks)) == ForwardKey(*key)


def test_prompt_logprobs_have_one_program():
    assert Buckets(64, 512).choose(plan_of(1, 3, targets=True)) == ForwardKey(512, 64, prompt_logprobs=True)


@pytest.mark.parametrize(("num_decode", "chunks"), [(0, (513,)), (65, ()), (1, (512,))])
@pytest.mark.parametrize("targets", [False, True])
def test_too_large_a_step_is_an_error_with_the_numbers(num_decode, chunks, targets):
    with pytest.raises(ValueError, match=r"512 tokens, 64 rows"):
        Buckets(64, 512).choose(plan_of(num_decode, *chunks, targets=targets and bool(chunks)))


def test_every_step_finds_its_sample_program():
    buckets = Buckets(64, 512)
    assert len(buckets.sample) == 3 * 6
    for key in buckets.forward:
        for level in range(4):
            for logprobs in (False, True):
                found = buckets.sample_key(key.num_rows, level, logprobs)
                assert found in buckets.sample
                assert found.level >= level and found.logprobs >= logprobs
    assert buckets.sample_key(8, 0, False) == SampleKey(8, 0, False)  # greedy pays for nothing else
    assert buckets.sample_key(8, 1, False) == SampleKey(8, 3, True)
    on_a_card = Buckets(64, 512, GPU_SAMPLERS)
    assert on_a_card.sample_key(8, 1, False) == SampleKey(8, 1, False) in on_a_card.sample
    assert on_a_card.sample_key(8, 1, True) == on_a_card.sample_key(8, 2, False) == SampleKey(8, 3, True)
