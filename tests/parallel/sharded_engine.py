"""Runs on 8 CPU devices, in a process of its own: an engine on a mesh gives one device's answers."""

from __future__ import annotations

import sys

import jax
import numpy as np

from tests.fakes import run_requests
from tests.runtime.requests import Limited, random_requests, scheduler_config
from tests.runtime.test_equality import check_equal
from tests.runtime.tiny import tiny_executor

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def main(count: int, sizes: list[int]) -> None:
    requests = random_requests(count, seed=11)
    arrivals = {r.handle: int(np.random.default_rng(r.handle).integers(0, count)) for r in requests}
    config = scheduler_config()

    def answers(tp: int):
        executor = Limited(tiny_executor(tensor_parallel_size=tp), num_blocks=26)
        found, scheduler = run_requests(requests, config, executor.info, executor, arrivals=arrivals)
        stats = scheduler.stats()
        assert executor.executor.stats()["compiles_total"] == 0
        assert stats.preemptions > 0 and stats.prefix_hits > 0, stats
        return found

    alone = answers(1)
    for tp in sizes:
        check_equal(requests, alone, answers(tp))
        print(f"tp {tp} equal", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
