"""When a request is refused because too many wait."""

import pytest

from lmjax.core.scheduler import Scheduler
from tests.core.test_scheduler import config, prompt
from tests.fakes import fake_info, request


def test_queue_caps():
    for changes in ({"max_num_queued_reqs": 2}, {"max_num_queued_tokens": 25}):
        scheduler = Scheduler(config(**changes), fake_info(max_num_seqs=1))
        scheduler.add(request(90, prompt(10)))
        scheduler.schedule()  # the only slot is taken
        for handle in range(4):
            scheduler.add(request(10 * handle, prompt(10), n=2))
        ends = scheduler.take_events().finished
        assert [end.handle for end in ends] == [20, 21, 30, 31]
        assert all(end.queue_full and end.reason == "error" for end in ends)
        scheduler.abort([0, 1])
        scheduler.add(request(50, prompt(10)))
        assert not any(end.queue_full for end in scheduler.state.finished), "one left the queue"


@pytest.mark.parametrize("changes", [{"max_num_queued_reqs": 4}, {"max_num_queued_tokens": 40}])
def test_a_burst_fills_the_free_slots_before_it_counts_as_waiting(changes):
    scheduler = Scheduler(config(**changes), fake_info(max_num_seqs=4))
    for handle in range(9):
        scheduler.add(request(handle, prompt(10)))
    assert [end.handle for end in scheduler.state.finished] == [8]
