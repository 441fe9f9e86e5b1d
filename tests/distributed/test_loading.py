"""Two processes together read each byte of a sharded tensor once, and small tensors that all hold once each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.cluster import free_port
from tests.server.live_server import ROOT
from tests.weights.checkpoints import LLAMA, tensors, write_hf


def load_in_two(path: Path) -> list[list[float]]:
    """What ``loading.py`` prints in both processes."""
    command = [sys.executable, "-m", "tests.distributed.loading", str(path)]
    port, environment = str(free_port()), {**os.environ, "JAX_PLATFORMS": "cpu"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    done = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], done
    return [[float(word) for word in out.split()[-3:]] for out, _ in done]


def test_each_byte_is_read_once(tmp_path):
    config = LLAMA | {"vocab_size": 512}  # 2 KV heads on 4 devices: each on the two of one process
    path = write_hf(tmp_path / "hf", config, tensors(config), shards=2)
    stored = sum(tensor.nbytes for tensor in tensors(config).values())
    (read_0, everywhere, _), (read_1, same, _) = load_in_two(path)
    assert everywhere == same and 0 < everywhere < stored / 20
    assert read_0 + read_1 == stored + everywhere
    assert 0.4 * stored < read_0 < 0.6 * stored


@pytest.mark.slow
def test_memory_grows_by_the_share(tmp_path):
    """500 MB and more of weights."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 8192}
    config = LLAMA | sizes | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    made = tensors(config)
    assert sum(tensor.nbytes for tensor in made.values()) > 500e6
    path = write_hf(tmp_path / "hf", config, made, shards=2)
    del made
    for _, _, growth in load_in_two(path):
        print(f"RssAnon grew by {growth:.3f} of the share")
        assert 0.9 < growth <= 1.3
