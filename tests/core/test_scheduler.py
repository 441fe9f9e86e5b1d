"""What the scheduler promises, one thing a test."""

from dataclasses import replace

import numpy as np
import pytest

from lmjax.config import SchedulerConfig
from lmjax.core.plan import StepResult, TokenColumns, pack_rows, row_key, row_width, unpack_rows
from lmjax.core.scheduler import Scheduler, request_seed
from tests.fakes import Driver, FakeExecutor, fake_info, full_spec, request, run_requests, window_spec

EVERY = tuple(range(1, 257))  # token buckets that trim nothing


def config(**changes):
    return SchedulerConfig(**{"max_num_batched_tokens": 64, **changes})


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def run(requests, info=None, overlap=True, arrivals=None, **changes):
    info = info or replace(fake_info(), max_loras=1)
    return run_requests(requests, config(**changes), info, FakeExecutor(info), overlap, arrivals, check=True)


def answer(plan, token=5):
    """A result with the same token for all rows."""
    return StepResult(np.where(plan.samples, token, -1).astype(np.int32)[:, None])


# ends


@pytest.mark.parametrize("overlap", [True, False])
def test_max_tokens_and_context_end_with_length(overlap):
    info = fake_info(max_model_len=40)
    answers, _ = run(
        [request(0, prompt(10), max_tokens=7), request(1, prompt(30), max_tokens=None)], info, overlap=overlap
    )
    assert (len(answers[0].token_ids), answers[0].reason) == (7, "length")
    assert (len(answers[1].token_ids), answers[1].reason) == (10, "length")


def one_at_a_time(requests, token=5, steps=30, **changes):
    """Runs on results that are all ``token``; returns the events and the tokens by handle."""
    scheduler = Scheduler(config(**changes), fake_info())
    for new in requests:
        scheduler.add(new)
    tokens, ends = {}, {}
    for _ in range(steps):
        plan = scheduler.schedule()
        output = scheduler.take_events() if plan is None else scheduler.update(plan, answer(plan, token))
        if output is None:
            break
        handles, rows = output.arrays()
        for handle, token_id in zip(handles.tolist(), rows[:, 0].tolist(), strict=True):
            tokens.setdefault(handle, []).append(token_id)
        ends.update((end.handle, end) for end in output.finished)
    scheduler.check_integrity()
    return tokens, ends


def test_stop_reason_is_the_id_if_asked_for_and_none_for_eos():
    asked = request(0, [1, 2], stop_token_ids=[5], stop_ids=(2, 5))
    eos = request(1, [1, 2], stop_token_ids=[9], stop_ids=(5, 9))
    tokens, ends = one_at_a_time([asked, eos])
    assert tokens == {0: [5], 1: [5]}
    assert (ends[0].reason, ends[0].stop_reason) == ("stop", 5)
    assert (ends[1].reason, ends[1].stop_reason) == ("stop", None)


@pytest.mark.parametrize("count", [1, 8, 9, 200])
def test_any_number_of_stop_ids(count):
    ids = (*range(100, 99 + count), 5)
    tokens, ends = one_at_a_time([request(0, [1], stop_ids=ids), request(1, [1], max_tokens=3)])
    assert tokens == {0: [5], 1: [5, 5, 5]} and ends[0].reason == "stop" and ends[1].reason == "length"


def test_stop_ids_do_not_stay_with_the_slot():
    info = fake_info(max_num_seqs=1)
    for count in (2, 20):
        scheduler = Scheduler(config(), info)
        scheduler.add(request(0, [1], max_tokens=1, stop_ids=tuple(range(5, 5 + count))))
        scheduler.add(request(1, [1], max_tokens=3))
        ends = []
        for _ in range(4):
            plan = scheduler.schedule()
            ends += [(e.handle, e.reason) for e in scheduler.update(plan, answer(plan)).finished]
        assert ends == [(0, "stop"), (1, "length")]


def test_never_stops_before_min_tokens():
    tokens, ends = one_at_a_time([request(0, [1, 2], stop_ids=(5,), min_tokens=3, max_tokens=9)])
    assert tokens == {0: [5] * 4} and ends[0].reason == "stop"


# refusals


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (request(0, []), "empty"),
        (request(0, prompt(512)), "no room for a reply"),
        (request(0, [3, 1000]), "token id 1000"),
        (request(0, [3, -1]), "token id -1"),
        (request(0, prompt(200)), "more than the KV cache of 8 blocks"),
    ],
)
def test_what_can_never_run_ends_at_once(new, words):
    scheduler = Scheduler(config(), fake_info(num_blocks=9))
    scheduler.add(new)
    assert scheduler.has_work()
    output = scheduler.take_events()
    assert [end.reason for end in output.finished] == ["error"] and words in output.finished[0].message
    assert not output.finished[0].queue_full
    assert not scheduler.has_work() and scheduler.take_events() is None


def test_a_prompt_over_the_budget_is_refused_if_chunks_are_off():
    scheduler = Scheduler(config(enable_chunked_prefill=False), fake_info())
    scheduler.add(request(0, prompt(65)))
    assert "chunked prefill is off" in scheduler.take_events().finished[0].message


# the pool


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_outgrows_the_pool_alone_ends_with_length(overlap):
    info = fake_info(num_blocks=9)
    answers, _ = run([request(0, prompt(100), max_tokens=100), request(1, prompt(5))], info, overlap)
    # position 128 has no room: the token there was drawn, the one after it cannot be
    assert answers[0].reason == "length" and len(answers[0].token_ids) == 128 - 100 + 1
    assert answers[1].reason == "length" and len(answers[1].token_ids) == 16


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pair_that_only_fits_in_turn_ends_by_preemption(overlap):
    info = fake_info(num_blocks=9)
    pair = [request(i, prompt(60, i), max_tokens=60) for i in range(2)]
    answers, scheduler = run(pair, info, overlap)
    assert [len(answers[i].token_ids) for i in range(2)] == [60, 60]
    assert scheduler.stats().preemptions >= 1


def test_eight_choices_in_a_small_pool():
    info = fake_info(num_blocks=9)
    answers, _ = run([request(0, prompt(40), n=8, max_tokens=40, temperature=1.0, seed=3)], info)
    assert [len(answers[i].token_ids) for i in range(8)] == [40] * 8
    assert len({tuple(answers[i].token_ids) for i in range(8)}) == 8


def test_who_never_fits_does_not_block_the_others():
    info = fake_info(num_blocks=9)
    answers, _ = run([request(0, prompt(200)), request(1, prompt(20))], info)
    assert answers[0].reason == "error" and answers[1].reason == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_several_times_and_no_token_is_lost_or_sent_twice(overlap):
    info, big = fake_info(num_blocks=12), fake_info()
    # the late one has the lowest priority: everybody preempts it
    crowd = [request(i, prompt(30 + i, i), max_tokens=100, priority=0 if i < 4 else 9, min_tokens=5) for i in range(5)]
    answers, scheduler = run(crowd, info, overlap, scheduling_policy="priority")
    expected, _ = run(crowd, big)
    assert scheduler.stats().preemptions >= 3
    for i in range(5):
        assert answers[i].token_ids == expected[i].token_ids and answers[i].reason == "length"
    stats = scheduler.stats()
    assert stats.prompt_tokens == sum(30 + i for i in range(5)), "the prompt counts once"
    assert stats.generation_tokens == 500


def test_the_lowest_priority_is_preempted():
    info = fake_info(num_blocks=9)
    driver = Driver(config(scheduling_policy="priority"), FakeExecutor(info), check=True)
    for handle, priority in ((0, 5), (1, 0), (2, 1)):
        driver.add(request(handle, prompt(40, handle), max_tokens=60, priority=priority))
    while not driver.scheduler.stats().preemptions:
        driver.step()
    assert driver.scheduler.state.requests[0].slot == -1
    driver.run()


# prefix cache


@pytest.mark.parametrize("specs", [(full_spec(),), (full_spec(), window_spec(20))])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_hits_are_full_blocks_and_leave_one_token(length, specs):
    info = fake_info(specs=specs)
    ids = prompt(length)
    longer, other = np.append(ids, 7), ids.copy()
    other[-1] += 1
    every = [request(i, p, max_tokens=20) for i, p in enumerate((ids, ids, longer, other))]
    answers, _ = run(every, info, arrivals={i: 60 * i for i in range(4)})
    assert [answers[i].num_cached for i in range(4)] == [
        0,
        (length - 1) // 16 * 16,
        length // 16 * 16,
        (length - 1) // 16 * 16,
    ]
    expected, _ = run(every, info, enable_prefix_caching=False)
    assert all(answers[i].token_ids == expected[i].token_ids for i in range(4))
    assert all(expected[i].num_cached == 0 for i in range(4))


def test_hits_among_requests_that_arrive_together():
    ids = prompt(40)
    answers, scheduler = run(
        [request(i, np.append(ids, i), max_tokens=3) for i in range(3)], max_num_batched_tokens=256
    )
    assert [answers[i].num_cached for i in range(3)] == [0, 32, 32]
    assert (scheduler.stats().prefix_queries, scheduler.stats().prefix_hits) == (123, 64)


def test_generated_blocks_are_found():
    ids = prompt(20)
    first, _ = run([request(0, ids, max_tokens=40)])
    history = np.concatenate((ids, np.array(first[0].token_ids, np.int32)))
    again, _ = run([request(0, ids, max_tokens=40), request(1, history, max_tokens=2)], arrivals={1: 60})
    # the KV of the last token was never computed
    assert again[1].num_cached == (len(history) - 1) // 16 * 16


@pytest.mark.parametrize("overlap", [True, False])
def test_a_block_whose_last_token_was_never_computed_is_not_found(overlap):
    first, _ = run([request(0, prompt(20), max_tokens=44)])
    history = np.concatenate((prompt(20), np.array(first[0].token_ids, np.int32)))
    assert len(history) == 64
    every = [request(0, prompt(20), max_tokens=44), request(1, np.append(history, 7), max_tokens=2)]
    again, _ = run(every, overlap=overlap, arrivals={1: 60})
    assert again[1].num_cached == 48


def test_another_salt_or_adapter_shares_nothing():
    ids = prompt(40)
    kinds = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"adapter": 1}, {"cache_salt": "a"}, {}]
    answers, _ = run([request(i, ids, max_tokens=2, **kind) for i, kind in enumerate(kinds)])
    assert [answers[i].num_cached for i in range(6)] == [0, 0, 0, 0, 32, 32]


def test_prompt_logprobs_compute_the_whole_prompt_and_still_name_it():
    ids = prompt(40)
    answers, _ = run([request(i, ids, max_tokens=2, prompt_logprobs=1 if i < 2 else None) for i in range(3)])
    assert [answers[i].num_cached for i in range(3)] == [0, 0, 32]
    assert sorted(answers[1].prompt_logprobs) == list(range(1, 40))
    assert answers[0].prompt_logprobs == answers[1].prompt_logprobs and not answers[2].prompt_logprobs


# choices


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_choices_share_the_prompt(length):
    info = fake_info(num_blocks=64, token_buckets=EVERY)
    executor = FakeExecutor(info)
    driver = Driver(config(enable_prefix_caching=False), executor, check=True)
    driver.add(request(0, prompt(length), n=4, max_tokens=5, temperature=1.0, seed=1))
    driver.step()
    plan = driver.scheduler.schedule()
    full = (length - 1) // 16
    assert plan.num_decode == 1 and plan.num_rows == 4
    assert plan.lengths.tolist() == [1] * 4 and plan.starts.tolist() == [length] + [length - 1] * 3
    assert plan.token_ids.tolist() == [int(prompt(length)[-1])] * 3
    assert len(plan.copies) == (3 if (length - 1) % 16 else 0)
    tables = driver.scheduler.state.kv.tables[0, plan.slots]
    assert (tables[:, :full] == tables[0, :full]).all() and len(set(tables[:, full].tolist())) == 4
    assert [load.sample_index for load in plan.slot_loads] == [1, 2, 3]
    assert {load.seed for load in plan.slot_loads} == {1}


def test_choices_have_a_common_seed_drawn_once():
    info = fake_info()
    seen = []

    class Watch(FakeExecutor):
        def submit(self, plan):
            seen.extend((load.seed, load.sample_index) for load in plan.slot_loads)
            return super().submit(plan)

    run_requests([request(5, prompt(8), n=3)], config(seed=7), info, Watch(info))
    assert seen == [(request_seed(7, 5), i) for i in range(3)]
    assert request_seed(7, 5) not in (request_seed(8, 5), request_seed(7, 6))


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("which", range(3))
def test_abort_of_one_choice_leaves_the_others(which, when):
    new = request(0, prompt(100), n=3, max_tokens=8, temperature=1.0, seed=2)
    expected, _ = run([new])
    driver = Driver(config(), FakeExecutor(fake_info()), check=True)
    driver.add(new)
    for _ in range(when):
        driver.step()
    driver.scheduler.abort([which])
    driver.run()
    assert not driver.executor.errors
    for i in range(3):
        if i != which:
            assert driver.answers[i].token_ids == expected[i].token_ids
    assert driver.answers[which].reason == "abort"
    assert driver.answers[which].token_ids == expected[which].token_ids[: len(driver.answers[which].token_ids)]


def test_abort_of_all_states_leaves_nothing():
    driver = Driver(config(), FakeExecutor(fake_info(max_num_seqs=2)), check=True)
    for i in range(5):
        driver.add(request(3 * i, prompt(50, i), n=2))
    for _ in range(3):
        driver.step()
    driver.scheduler.abort([*range(20), 999])
    driver.scheduler.check_integrity()
    driver.run()
    assert {a.reason for a in driver.answers.values()} == {"abort"}
    assert driver.scheduler.state.kv.pools[0].num_used == 0 and driver.scheduler.stats().num_waiting == 0


# budget


def test_decodes_go_first_and_prefill_fills_the_rest():
    scheduler = Scheduler(config(max_num_batched_tokens=32), fake_info(token_buckets=EVERY))
    scheduler.add(request(0, prompt(10), max_tokens=50))
    plan = scheduler.schedule()
    scheduler.update(plan, answer(plan))
    scheduler.add(request(1, prompt(100, 1)))
    sizes = []
    for _ in range(4):
        plan = scheduler.schedule()
        assert plan.num_decode == 1 and plan.starts[0] == 10 + len(sizes)
        sizes.append(plan.lengths.tolist())
        scheduler.update(plan, answer(plan))
    assert sizes == [[1, 31], [1, 31], [1, 31], [1, 7]]


def test_chunks_off_takes_whole_prompts_only():
    scheduler = Scheduler(config(enable_chunked_prefill=False), fake_info())
    for i in range(2):
        scheduler.add(request(i, prompt(40, i)))
    assert scheduler.schedule().lengths.tolist() == [40]


def test_long_prefill_threshold_leaves_room_for_others():
    scheduler = Scheduler(config(long_prefill_token_threshold=24), fake_info())
    for i in range(3):
        scheduler.add(request(i, prompt(60, i)))
    assert scheduler.schedule().lengths.tolist() == [24, 24, 16]


@pytest.mark.parametrize(
    ("length", "lengths"),
    [(33, [32]), (39, [32]), (40, [40]), (49, [49]), (64, [64]), (3, [3]), (9, [9])],
)
def test_steps_fill_token_buckets_to_the_edge(length, lengths):
    scheduler = Scheduler(config(), fake_info(token_buckets=(8, 16, 32, 64)))
    scheduler.add(request(0, prompt(length)))
    assert scheduler.schedule().lengths.tolist() == lengths


def test_trimming_never_removes_a_row():
    scheduler = Scheduler(config(), fake_info(token_buckets=(8, 16, 64)))
    scheduler.add(request(0, prompt(16)))
    scheduler.add(request(1, prompt(1, 1)))
    assert scheduler.schedule().lengths.tolist() == [16, 1]


def test_decodes_take_turns_when_they_are_more_than_the_budget():
    answers, _ = run([request(i, prompt(3, i), max_tokens=10) for i in range(12)], max_num_batched_tokens=5)
    assert all(len(a.token_ids) == 10 for a in answers.values())


# overlap


def test_the_token_after_a_stop_is_thrown_away():
    scheduler = Scheduler(config(), fake_info())
    scheduler.add(request(0, [1, 2], stop_ids=(5,)))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.num_decode == 1
    output = scheduler.update(first, answer(first))
    assert output.finished[0].reason == "stop"
    scheduler.add(request(1, [3]))
    third = scheduler.schedule()
    assert third.slots[0] == second.slots[0], "the slot has a new owner"
    late = scheduler.update(second, answer(second, 9))
    assert not len(late.handles) and not late.finished
    assert scheduler.update(third, answer(third)).handles.tolist() == [1]
    scheduler.check_integrity()


def test_a_result_of_an_earlier_epoch_does_not_count():
    scheduler = Scheduler(config(), fake_info())
    scheduler.add(request(0, [1, 2]))
    plan = scheduler.schedule()
    old = replace(plan, keys=plan.keys - 1)
    assert not len(scheduler.update(old, answer(old)).handles)
    assert scheduler.update(plan, answer(plan)).rows.tolist() == [[5]]


def test_lengths_are_known_when_planning():
    scheduler = Scheduler(config(), fake_info())
    scheduler.add(request(0, [1, 2], max_tokens=2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second is not None and scheduler.schedule() is None
    scheduler.update(first, answer(first))
    assert scheduler.update(second, answer(second)).finished[0].reason == "length"


def test_a_token_that_arrives_after_preemption_is_kept():
    scheduler = Scheduler(config(), fake_info(token_buckets=EVERY))
    scheduler.add(request(0, prompt(10), max_tokens=5))
    first = scheduler.schedule()
    second = scheduler.schedule()
    state = scheduler.state
    held = state.requests[0]
    state.preempt(held)
    assert (held.epoch, held.pending) == (1, 2)
    assert scheduler.update(first, answer(first, 7)).rows.tolist() == [[7]]
    assert scheduler.schedule() is None, "it may not come back before its last token arrived"
    assert scheduler.update(second, answer(second, 8)).rows.tolist() == [[8]]
    third = scheduler.schedule()
    assert third.keys.tolist() == [row_key(0, 1)] and third.starts.tolist() == [0] and third.lengths.tolist() == [12]
    assert third.slot_loads[0].history[-2:].tolist() == [7, 8] and third.slot_loads[0].num_prompt_tokens == 10
    assert scheduler.update(third, answer(third, 9)).rows.tolist() == [[9]]
    scheduler.check_integrity()


def test_a_preempted_request_can_end_while_it_waits():
    scheduler = Scheduler(config(), fake_info(token_buckets=EVERY))
    scheduler.add(request(0, prompt(10), stop_ids=(5,)))
    plan = scheduler.schedule()
    scheduler.state.preempt(scheduler.state.requests[0])
    output = scheduler.update(plan, answer(plan))
    assert output.rows.tolist() == [[5]] and output.finished[0].reason == "stop"
    assert not scheduler.has_work() and len(scheduler.state.queue) == 0
    scheduler.check_integrity()


# outputs


def test_rows_have_the_largest_k_asked_for():
    scheduler = Scheduler(config(), fake_info())
    for i, asked in enumerate((None, 2, 0, None, 4)):
        scheduler.add(request(i, prompt(4, i), logprobs=asked))
    plan = scheduler.schedule()
    n = np.arange(5)
    whole = TokenColumns(n, -n, n + 1, n[:, None] * 10 + n, -(n[:, None] + n))
    output = scheduler.update(plan, StepResult(pack_rows(whole)))
    handles, rows = output.arrays()
    assert handles.tolist() == [0, 1, 2, 3, 4] and output.width == row_width(4)
    columns = unpack_rows(rows)
    for have, wanted in zip(columns[:3], whole[:3], strict=True):
        assert have.tolist() == wanted.tolist()
    assert columns.top_ids.tolist() == whole.top_ids[:, :4].tolist()
    assert columns.top_logprobs.tolist() == whole.top_logprobs[:, :4].tolist()


def test_stats():
    scheduler = Scheduler(
        config(max_num_batched_tokens=32), fake_info(max_num_seqs=1, num_blocks=11, token_buckets=EVERY)
    )
    for i in range(3):
        scheduler.add(request(i, prompt(20, i), max_tokens=4))
    plan = scheduler.schedule()
    scheduler.update(plan, answer(plan))
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (1, 2, 0.2)
    assert (stats.steps, stats.scheduled_tokens, stats.iteration_tokens) == (1, 20, [20])
    assert (stats.prompt_tokens, stats.generation_tokens) == (20, 1)
    scheduler.abort([0, 1, 2])
    assert scheduler.stats().kv_usage == 0.0, "cached-free blocks are free"
    assert scheduler.stats().iteration_tokens == []
