"""Weights that change, and sleep, in one engine of two processes: all ranks or none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cluster import Cluster, flags
from tests.fixtures import make_model
from tests.server.live_server import LiveServer, Reply

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
ADMIN = {"Authorization": "Bearer sk-admin"}
LONG = "the quick brown fox jumps over the lazy dog"
SHAPES = {"tensor": {}, "pipeline": {"--tensor-parallel-size": "2", "--pipeline-parallel-size": "2"}}


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``home0`` and ``home1``: each rank has its own, so that paths with ~ lead to different places."""
    root = tmp_path_factory.mktemp("homes")
    for rank in range(2):
        make_model(root / f"home{rank}" / "new", seed=1)
    make_model(root / "home0" / "only_here", seed=2)
    make_model(root / "home0" / "other_files", seed=2)
    shutil.copytree(root / "home0" / "other_files", root / "home1" / "other_files")
    (root / "home1" / "other_files" / "model.safetensors").rename(
        root / "home1" / "other_files" / "model-00001.safetensors"
    )
    return root


@pytest.fixture(scope="module", params=SHAPES)
def cluster(request: pytest.FixtureRequest, homes: Path) -> Iterator[Cluster]:
    launcher = ("scripts/launch_local.sh", "2", "2", "-b", f"env HOME={homes}/home%")
    made = Cluster("RAND", flags(SHAPES[request.param] | {"--admin-api-key": "sk-admin"}), launcher=launcher)
    yield made
    made.close()


def tokens(server: LiveServer, prompt: str = LONG, count: int = 40) -> list[int]:
    reply = server.complete(prompt=prompt, max_tokens=count, ignore_eos=True, return_token_ids=True)
    assert reply.status == 200, reply.body[:300]
    return reply.json["choices"][0]["token_ids"]


def admin(server: LiveServer, method: str, route: str, /, **body: Any) -> Reply:
    return server.send(method, route, body or None, ADMIN)


def test_all_ranks_or_none(cluster: Cluster, homes: Path) -> None:
    alone = LiveServer("RAND", flags())
    try:
        old = tokens(alone)
    finally:
        alone.close()
    assert tokens(cluster) == old
    for name, said in (("only_here", "rank 1: "), ("other_files", "rank 1 has other files there than rank 0")):
        reply = admin(cluster, "POST", "/v1/weights", path=f"~/{name}")
        assert reply.status == 400 and said in reply.json["error"]["message"], reply.body
        assert tokens(cluster) == old
    replies: list[Reply] = []

    def run(prompt: str) -> None:
        body = {"max_tokens": 110, "ignore_eos": True, "return_token_ids": True}
        replies.append(cluster.complete(prompt=prompt, **body))

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in "abcdef"]
    for thread in threads:
        thread.start()
    reply = admin(cluster, "POST", "/v1/weights", path="~/new", version="new")
    assert reply.status == 200 and reply.json["version"] == "new", reply.body
    for thread in threads:
        thread.join()
    for answer in replies:
        assert answer.status == 200 and len(answer.json["choices"][0]["token_ids"]) == 110
    fresh = LiveServer("RAND", (*flags(), "--model", str(homes / "home0" / "new")))
    try:
        new = tokens(fresh)
    finally:
        fresh.close()
    assert tokens(cluster) == new != old
    for level in (1, 2):
        assert admin(cluster, "POST", f"/sleep?level={level}").status == 200
        assert admin(cluster, "POST", "/wake_up").status == 200
        assert tokens(cluster) == new
    assert admin(cluster, "GET", "/v1/weights").json == {"version": "new"}
    assert cluster.metrics()["compiles_total"] == 0
