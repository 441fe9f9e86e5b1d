"""2 processes x 2 devices over gloo, as ``launch_local.sh`` starts them: one device's answers, and a common end."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cluster import FLAGS, Cluster, flags, free_port, start
from tests.fixtures import model_dir
from tests.server.http_checks import at_once
from tests.server.live_server import ROOT, LiveServer

pytestmark = pytest.mark.timeout(900)
LONG = "the quick brown fox jumps over the lazy dog"  # more than two blocks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    server = start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[LiveServer]:
    server = LiveServer("RAND", flags())
    yield server
    server.close()


def bodies() -> list[dict[str, Any]]:
    common = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    sampled = common | {"temperature": 1.0}
    return [
        common | {"prompt": LONG, "logprobs": 2},
        common | {"prompt": LONG + " again", "logprobs": 2},
        sampled | {"prompt": LONG, "seed": 7, "n": 3, "logprobs": 1},
        sampled | {"prompt": "hello", "seed": 8, "top_p": 0.8, "repetition_penalty": 1.3, "max_tokens": 70},
        sampled | {"prompt": LONG + " a", "seed": 9, "top_k": 20, "frequency_penalty": 0.5},
        common | {"prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 4},
        sampled | {"prompt": "b" * 40, "seed": 10, "min_p": 0.02, "logit_bias": {"97": 3}},
        common | {"prompt": "c", "max_tokens": 90},
    ]


def test_answers_are_those_of_one_device(cluster: Cluster, alone: LiveServer) -> None:
    """Prefix hits, preemption, log-probabilities, seeded sampling and n > 1 at once."""
    check_equal(cluster, alone)
    front = Path(f"/proc/{cluster.processes()['front 1']}/environ").read_bytes()
    assert b"BEFORE=1\0" in front and b"CUDA_VISIBLE_DEVICES=2,3\0" in front
    said = cluster.logged()
    assert "rank 1 of 2: no HTTP server here" in said and "[Gloo]" in said


@pytest.mark.slow
def test_a_pipeline_over_two_processes(alone: LiveServer) -> None:
    """A stage of two devices on each."""
    server = start(**{"--tensor-parallel-size": "2", "--pipeline-parallel-size": "2"})
    try:
        check_equal(server, alone)
    finally:
        server.close()


def check_equal(cluster: Cluster, alone: LiveServer) -> None:
    asked = bodies()
    for server in (alone, cluster):
        assert server.complete(prompt=LONG, max_tokens=1).status == 200  # a prefix to hit
    found = {
        name: at_once(lambda body, server=server: server.complete(**body), asked)
        for name, server in (("alone", alone), ("cluster", cluster))
    }
    for body, one, many in zip(asked, found["alone"], found["cluster"], strict=True):
        assert one.status == many.status == 200, (body, many.body[:300])
        for a, b in zip(one.json["choices"], many.json["choices"], strict=True):
            assert a["token_ids"] == b["token_ids"], body
            if a["logprobs"]:
                ours, theirs = (x["logprobs"]["token_logprobs"] for x in (a, b))
                assert [x or 0.0 for x in theirs] == pytest.approx([x or 0.0 for x in ours], abs=1e-4)
    numbers = cluster.metrics()
    assert numbers["num_preemptions_total"] > 0 and numbers["prefix_cache_hits_total"] > 0, numbers
    assert numbers["compiles_total"] == 0, numbers


def streaming(server: Cluster) -> tuple[threading.Thread, list[bytes]]:
    """A request that is under way."""
    got: list[bytes] = []
    body = {"prompt": "x", "max_tokens": 120, "ignore_eos": True, "stream": True}

    def read() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # where the server itself is killed
            got.append(server.complete(**body, n=4).body)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.3)
    return thread, got


def end_by(cluster: Cluster, victim: str, number: int, message: str) -> None:
    """The signal to that process ends all within 30 s; the log has the message, and the client an error."""
    thread, got = streaming(cluster)
    since = time.monotonic()
    os.kill(cluster.processes()[victim], number)
    status = cluster.ended_in(30.0)
    print(f"{victim} signal {number}: all ended after {time.monotonic() - since:.1f} s")
    thread.join(5)
    assert status != 0
    assert message in cluster.logged(), cluster.logged()[-3000:]
    if victim.startswith("engine"):  # a stopped front end leaves its engine the time to finish
        assert b"error" in got[0][-400:], got


def test_a_second_rank_1_is_refused_and_the_first_goes_on(cluster: Cluster) -> None:
    stray = subprocess.run(
        rank_command(1, cluster.master_port, "4"), cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert stray.returncode == 2 and "--node-rank: rank 1 has joined already" in stray.stderr.splitlines()[-1], stray
    time.sleep(1.5)  # JAX's service would have ended all by now
    cluster.check_alive()


def test_kill_9_of_a_rank_ends_all(cluster: Cluster) -> None:
    end_by(cluster, "engine 1", signal.SIGKILL, "the engine is dead: rank 1 is lost")


SRUN = """#!/usr/bin/env bash
# srun as it starts two tasks of a job
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
  SLURM_JOB_ID={job} SLURM_PROCID=$task SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost "$@" &
  pids+=($!)
done
trap 'kill ${{pids[*]}}' TERM
status=0
for pid in ${{pids[*]}}; do wait $pid || status=$?; done
exit $status
"""


def test_the_slurm_script_and_a_stopped_rank(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(job=random.randrange(4096)))
    srun.chmod(0o755)
    launcher = ("env", f"PATH={tmp_path}:{os.environ['PATH']}", "bash", "scripts/launch_slurm.sbatch")
    server = start(launcher=launcher, **{"--tensor-parallel-size": "4"})
    try:
        assert server.complete(prompt="hello", max_tokens=8).status == 200
        end_by(server, "engine 1", signal.SIGSTOP, "the engine is dead: rank 1 is lost: rank 0 has not heard of it")
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number", "message"),
    [
        ("engine 0", signal.SIGKILL, "rank 0 is lost"),
        ("engine 0", signal.SIGSTOP, "the engine process of rank 0 gave no sign of life"),
        ("front 0", signal.SIGKILL, "rank 0 is lost"),
        ("front 0", signal.SIGSTOP, "rank 0: the front end gave no sign of life"),
        ("front 1", signal.SIGKILL, "rank 1 is lost"),
        ("front 1", signal.SIGSTOP, "rank 1: the front end gave no sign of life"),
    ],
)
def test_whichever_process_it_is(victim: str, number: int, message: str) -> None:
    server = start()
    try:
        end_by(server, victim, number, message)
    finally:
        server.close()


def rank_command(rank: int, port: int, devices: str, **changes: str) -> list[str]:
    """One of two, as by hand."""
    given = FLAGS | changes | {"--port": "0", "--host": "127.0.0.1", "--tensor-parallel-size": devices}
    given |= {"--nnodes": "2", "--node-rank": str(rank), "--master-addr": "127.0.0.1", "--master-port": str(port)}
    flags = [part for pair in given.items() for part in pair]
    return [sys.executable, "-m", "lmjax.cli", "serve", "--model", str(model_dir("RAND")), *flags]


def test_settings_that_differ_are_named() -> None:
    """On both ranks, before anything is loaded."""
    port, ranks = free_port(), []
    for rank in (0, 1):
        command = rank_command(rank, port, "2", **{"--max-num-seqs": str(4 + rank)})
        ranks.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    for rank, text in enumerate(said):
        last = text.splitlines()[-1]
        assert last.startswith(f"lmjax serve: rank {rank}: error: "), text
        assert last.endswith("--max-num-seqs: 4 on rank 0, 5 on rank 1"), text  # whoever said it first
        assert f" INFO rank {rank}: lmjax." in text, text
