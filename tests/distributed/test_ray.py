"""``launch_ray.py`` on a local Ray of two simulated nodes."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import pytest

from tests.distributed.cluster import LMJAX, flags
from tests.server.live_server import LiveServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")


@pytest.fixture
def address():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    yield cluster.address
    cluster.shutdown()


@dataclass
class ByRay(LiveServer):
    nodes: str = ""
    count: int = 2

    def command(self) -> list[str]:
        serve = super().command()
        given = serve[serve.index("serve") + 1 :]
        how = ["--nnodes", str(self.count), "--devices", "2", "--no-gpus", "--patience", "20", "--address", self.nodes]
        return ["env", f"LMJAX={LMJAX}", sys.executable, "scripts/launch_ray.py", *how, "--", *given]


def test_it_answers_and_ends(address):
    server = ByRay("RAND", flags(), nodes=address)
    try:
        assert server.complete(prompt="hello", max_tokens=8).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        said = server.logged()
        assert "rank 0, with the HTTP server, is on" in said and "rank 1 of 2: no HTTP server here" in said
    finally:
        server.close()


def test_too_few_nodes_are_refused(address):
    with pytest.raises(AssertionError, match="--nnodes: Ray has not 3 nodes"):
        ByRay("RAND", flags(), nodes=address, count=3)
