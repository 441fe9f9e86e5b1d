import numpy as np

from lmjax.core.policy import rank, victim
from lmjax.core.queue import WaitingQueue
from lmjax.core.request import Request
from lmjax.types import SamplingParams


def waiting(i, priority=0, arrival=0.0, policy="priority", tokens=3):
    prompt = np.zeros(tokens, np.int32)
    return Request(
        i, 0, prompt, SamplingParams(), (), None, rank(policy, priority, arrival, i), 0, 10, b"", history=prompt
    )


def drain(queue):
    order = []
    while (request := queue.peek()) is not None:
        queue.remove(request)
        order.append(request.handle)
    return order


def test_order_is_priority_then_arrival_then_add():
    queue = WaitingQueue()
    for request in (waiting(0, 2), waiting(1, 0, 5.0), waiting(2, 0, 1.0), waiting(3, 0, 1.0), waiting(4, 1)):
        queue.push(request)
    assert drain(queue) == [2, 3, 1, 4, 0]


def test_fcfs_knows_no_priority():
    queue = WaitingQueue()
    for request in (waiting(0, 2, policy="fcfs"), waiting(1, 0, policy="fcfs")):
        queue.push(request)
    assert drain(queue) == [0, 1]


def test_a_preempted_request_comes_back_to_the_front():
    queue = WaitingQueue()
    requests = [waiting(i) for i in range(5)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    queue.remove(requests[1])
    queue.push(requests[1])
    assert queue.peek() is requests[1]


def test_the_victim_is_of_the_lowest_priority_and_the_latest():
    assert victim([waiting(0, 1), waiting(1, 2, 1.0), waiting(2, 2, 2.0), waiting(3, 0, 9.0)]).handle == 2


def test_random_removals_against_a_sorted_list():
    rng = np.random.default_rng(0)
    queue, model = WaitingQueue(), []
    for i in range(3000):
        if rng.random() < 0.55 or not model:
            request = waiting(i, int(rng.integers(5)), float(rng.random()), tokens=int(rng.integers(1, 9)))
            queue.push(request)
            model.append(request)
        else:
            request = model.pop(int(rng.integers(len(model))))
            queue.remove(request)
            if rng.random() < 0.3:
                queue.push(request)
                model.append(request)
        assert queue.peek() is (min(model, key=lambda r: r.rank) if model else None)
        if i % 100 == 0:
            queue.check_integrity()
    assert len(queue) == len(model) and queue.num_tokens == sum(len(r.history) for r in model)
    assert len(queue._heap) <= 2 * len(model) + 64, "dead entries pile up"
