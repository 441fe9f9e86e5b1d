"""Where the arrays and the code of a step go: one mesh of devices, one ``shard_map`` around a whole program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmjax.models.lora import adapter_specs
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import Env
from lmjax.parallel import split
from lmjax.parallel.rules import ALL, LOGITS, POOL, PP, REPLICATED, STAGES, TP, partition_specs, placed
from pallas_kernels.platform import Backend, Target


@dataclass(frozen=True)
class Placement:
    """``mesh``: axes ``pp`` (pipeline stages) and ``tp``. ``expert_parallel``: devices hold whole experts, not a share
    of each."""

    mesh: Mesh
    expert_parallel: bool = False

    @property
    def size(self) -> int:
        return self.mesh.devices.size

    @property
    def degree(self) -> split.Degree:
        return split.Degree(tp=self.mesh.shape[TP], pp=self.mesh.shape[PP], expert_parallel=self.expert_parallel)

    @property
    def stages(self) -> int:
        return self.mesh.shape[PP]

    def env(self, target: Target, attention: Backend = "auto") -> Env:
        within = self.mesh.shape[TP] > 1
        return Env(
            target,
            attention,
            axis=TP if within else None,
            spread_experts=within and self.expert_parallel,
            vocab_axis=ALL if self.size > 1 else None,
        )

    def spread(self, spec: DecoderSpec) -> DecoderSpec:
        """What all devices hold together of a model. Raises ``SplitError``."""
        return split.spread(spec, self.degree)

    def share(self, spec: DecoderSpec) -> DecoderSpec:
        """One device's share of a spec made by ``spread``."""
        return split.share(spec, self.degree)

    def params(self, spec: DecoderSpec) -> Any:
        return partition_specs(spec, self.expert_parallel)

    def adapters(self, spec: DecoderSpec, rank: int) -> Any:
        """Of ``models.lora.adapter_specs`` with any number of slots."""
        return placed(adapter_specs(spec, 1, rank), self.expert_parallel)

    def place(self, tree: Any, specs: Any = REPLICATED) -> Any:
        """Abstract arrays with their shardings. ``specs``: a tree of PartitionSpecs, or one for all."""
        if isinstance(specs, PartitionSpec):
            specs = jax.tree.map(lambda _: specs, tree)

        def put(leaf: Any, spec: PartitionSpec) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(put, tree, specs)

    def wrap(self, function: Callable[..., Any], arguments: Any, results: Any) -> Callable[..., Any]:
        """A function of one device's shares -> the same for all of them. ``arguments``, ``results``: trees of
        PartitionSpecs."""
        if self.size == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False)

    def wrap_forward(
        self,
        forward: Callable[..., Any],
        spec: DecoderSpec,
        num_groups: int,
        pooled: bool = False,
        adapters: Any = None,
    ) -> Callable[..., Any]:
        """``runtime.forward``'s function, or ``runtime.tick``'s where there are stages. pooled: it has no logits.
        adapters: PartitionSpecs of its last argument; None: it has none."""
        pools = (POOL,) * num_groups
        own = (REPLICATED,) if self.stages == 1 else (STAGES, STAGES)  # block tables, and a tick's hidden states
        return self.wrap(
            forward,
            (self.params(spec), pools, REPLICATED, *own, REPLICATED, *(() if adapters is None else (adapters,))),
            (REPLICATED if pooled else LOGITS, pools, REPLICATED, *own, REPLICATED),
        )

    def wrap_sample(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        return self.wrap(sample, (LOGITS, REPLICATED, REPLICATED, REPLICATED), (REPLICATED, REPLICATED))


def make_mesh(devices: Sequence[Any], stages: int = 1) -> Mesh:
    """A mesh over all ``devices`` (real ones, or of a topology), in their order: a stage's devices are neighbours."""
    return Mesh(np.array(devices).reshape(stages, -1), ALL, axis_types=(AxisType.Auto,) * 2)
