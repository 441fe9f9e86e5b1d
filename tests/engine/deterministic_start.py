"""Runs in a process of its own: what an engine with ``--deterministic`` answers, on so many CPU devices.

Prints the counts of ``benchmarks.deterministic.repeat`` as JSON.
"""

from __future__ import annotations

import json
import sys

from benchmarks.deterministic import repeat

# few programs each; the second has a pool that is too small, and other chunks
ENGINES = (
    {"max_num_seqs": 24, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 21},
    {"max_num_seqs": 6, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 18},
)


def answers(runs: int, tp: int = 1, deterministic: bool = True) -> dict:
    """One layer of SmolLM2's shapes. Three heads of keys, so 3 devices divide it."""
    settings = {"tensor_parallel_size": tp, "max_model_len": 256}
    return repeat(runs, deterministic, 1, most=9, engines=ENGINES, **settings)


if __name__ == "__main__":
    print(json.dumps(answers(*map(int, sys.argv[1:]))))
