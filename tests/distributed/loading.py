"""Runs as one of two processes of 2 CPU devices: loads a checkpoint on all four and counts what it reads."""

from __future__ import annotations

import sys

import jax
import numpy as np

from benchmarks.loading import Growth
from lmjax.models import decoder
from lmjax.models.params import named_leaves
from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.weights.loader import Spread, load_params
from lmjax.weights.source import resolve_model
from tests.weights.sharded_loading import Counter


def main(path: str, rank: int, port: str) -> None:
    counter = Counter()
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, cluster_detection_method="deactivate")
    source = resolve_model(path)
    spec = spec_from_hf(source.config, None)
    wide = split.spread(spec, split.Degree(4))
    placement = Placement(make_mesh(jax.devices()))
    specs = placement.params(wide)
    placed = placement.place(decoder.abstract_params(wide, "float32"), specs)
    counter.total = 0
    with Growth() as growth:
        found = load_params(source, spec, "float32", spread=Spread(wide, placed))
    assert all(len(leaf.addressable_shards) == 2 for leaf in jax.tree.leaves(found))
    everywhere = sum(
        int(np.prod(leaf.shape)) * 4 for leaf in named_leaves(placed).values() if leaf.sharding.is_fully_replicated
    )
    share = sum(shard.data.nbytes for leaf in jax.tree.leaves(found) for shard in leaf.addressable_shards)
    print(counter.total, everywhere, growth.bytes / share, flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
