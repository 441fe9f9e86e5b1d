"""Two processes together read each byte of a sharded tensor once, and small tensors that all hold once each."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.distributed.cluster import free_port
from tests.server.live_server import ROOT
from tests.weights.checkpoints import LLAMA, tensors, write_hf


def test_each_byte_is_read_once(tmp_path):
    config = LLAMA | {"vocab_size": 512}  # 2 KV heads on 4 devices: each on the two of one process
    path = write_hf(tmp_path / "hf", config, tensors(config), shards=2)
    stored = sum(tensor.nbytes for tensor in tensors(config).values())
    command = [sys.executable, "-m", "tests.distributed.loading", str(path)]
    port, environment = str(free_port()), {**os.environ, "JAX_PLATFORMS": "cpu"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    done = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], done
    (read_0, everywhere), (read_1, same) = (map(int, out.split()[-2:]) for out, _ in done)
    assert everywhere == same and 0 < everywhere < stored / 20
    assert read_0 + read_1 == stored + everywhere
    assert 0.4 * stored < read_0 < 0.6 * stored
