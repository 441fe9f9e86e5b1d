"""Sampling with the vocabulary spread over devices draws what one device draws, and gathers nothing of its size."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import pytest

from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.sampling.chunks import CHUNK
from tests.parallel.sharded_forward import COMMON, LLAMA

# sample (raw log-probabilities), processed or branchless:vocab:rows:level:max_logprobs:steps:degrees, and
# prompt:vocab:degree:k. With 1,000 tokens on 8 devices the last share has 104 of 128 rows, with 300 most have none.
CASES = [
    "sample:1000:5:3:20:12:8",
    "sample:32003:64:3:0:2:3",
    "processed:49152:1:2:20:6:4",
    "processed:1000:5:3:20:8:8",
    "sample:49152:5:1:0:6:2",
    "sample:300:64:0:20:4:3+8",
    "branchless:1000:5:3:0:12:8",
    "branchless:32003:5:2:0:6:3",
    "prompt:300:8:200",
]


def run_apart(cases, timeout):
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.sharded_sampling", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_equals_one_device():
    lines = run_apart(CASES, 400).splitlines()
    assert [line.split()[0] for line in lines] == CASES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "rows"), [(100, 5), (1000, 1), (1000, 64), (32003, 5), (32003, 64), (49152, 1), (49152, 64)]
)
def test_equals_one_device_everywhere(vocab, rows):
    kinds = ((0, 20), (1, 0), (2, 0), (3, 20))
    cases = [f"sample:{vocab}:{rows}:{level}:{top}:{max(120 // rows, 6)}:2+3+4+8" for level, top in kinds]
    cases += [f"prompt:{vocab}:{tp}:{k}" for tp, k in ((2, 0), (3, 5), (4, 20), (8, 200))]
    assert len(run_apart(cases, 1200).splitlines()) == len(cases)


SHAPE = re.compile(r"\b[a-z]+\d+\[([\d,]*)\]")
COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(text: str) -> list[tuple[str, int]]:
    """Kind and number of elements (of all results together) of each, also in branches and loops."""
    found = []
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in SHAPE.findall(match[1])]
            found.append((match[2], sum(sizes)))
    return found


def test_nothing_of_the_size_of_the_vocabulary_travels():
    """The engine's program with all features: an eighth of the vocabulary would be what one device has of it."""
    tp, vocab, rows = 8, 49152, 4
    found = collectives(run_apart([f"program:{tp}:{vocab}:{rows}:3"], 200))
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    assert max(size for _, size in found) < rows * vocab / tp, found
    assert ("all-gather", rows * vocab // CHUNK) in found, "sums of chunks"


def test_the_parser_of_collectives_sees_large_ones():
    line = "  %x = (f32[8,16]{1,0}, s32[]) all-gather-start(f32[1,16]{1,0} %y, s32[] %z), dimensions={0}"
    assert collectives(line) == [("all-gather", 129)]


@pytest.mark.parametrize(("vocab", "tp"), [(101, 2), (49152, 8), (32003, 4), (128256, 8)])
def test_shares_are_whole_chunks(vocab, tp):
    """Else chunks would differ from those of one device, and with them the draws."""
    spec = spec_from_hf({**COMMON, **LLAMA, "vocab_size": vocab}, None)
    rows = split.spread(spec, split.Degree(tp)).num_vocab_rows
    assert split.VOCAB_CHUNK == CHUNK
    assert rows % (tp * CHUNK) == 0 and vocab <= rows < vocab + tp * CHUNK
    assert split.share(split.spread(spec, split.Degree(tp)), split.Degree(tp)).num_vocab_rows == rows // tp
