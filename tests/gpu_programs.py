"""The programs of well-known models compiled for cards that aren't there, and what can be read of them."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.runtime import cards, hlo
from lmjax.runtime.buckets import ForwardKey
from lmjax.runtime.programs import Shapes, forward_program
from tests import deviceless

CONFIGS = Path(__file__).parent / "configs"
MAX_SEQS, CONTEXT = 256, 8192
POOL_GIB = 6  # per device: offsets of pools beyond 4 GiB are 64-bit, which costs registers


@dataclass(frozen=True)
class Case:
    """``tokens``: the program's T. ``layers``: of the model, 0 for all."""

    model: str
    tp: int
    tokens: int
    layers: int = 4
    card: str = "h200"
    pp: int = 1

    @property
    def expert_parallel(self) -> bool:
        return self.model.startswith("mixtral") and self.tp > 1

    def __str__(self) -> str:
        how = f"{'EP' if self.expert_parallel else 'TP'} {self.tp}" + (f" PP {self.pp}" if self.pp > 1 else "")
        return f"{self.model} {how} T={self.tokens} L={self.layers}"

    @property
    def devices(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True)
class Read:
    layers: int
    instructions: list[hlo.Instruction]
    thunks: str
    pool_shape: str
    pool_bytes: int  # on one device
    alias_bytes: int
    argument_bytes: int
    temporary_bytes: int

    @property
    def launches(self) -> hlo.Launches:
        return hlo.launches(self.instructions)

    @property
    def num_all_reduces(self) -> int:
        return sum(c.kind == "all-reduce" for c in self.launches.collectives)

    @property
    def kernels_of_a_layer(self) -> int:
        return max(x.kernels for x in hlo.layer_launches(self.instructions).values())

    @property
    def num_command_buffers(self) -> int:
        return len(re.findall(r"^\d+: kCommandBuffer", self.thunks, flags=re.MULTILINE))

    @property
    def num_host_launches(self) -> int:
        return len(re.findall(r"^\d+: k", self.thunks, flags=re.MULTILINE))

    @property
    def pool_makers(self) -> list[str]:
        """What gives a whole pool but is no kernel of ours that updates it in place."""
        passing = ("parameter", "custom-call", "get-tuple-element", "tuple", "bitcast", "optimization-barrier")
        return [i.name for i in self.instructions if self.pool_shape in i.shape and i.opcode not in passing]


def make_shapes(case: Case, config: dict[str, Any]) -> Shapes:
    degree = split.Degree(case.tp, case.pp, case.expert_parallel)
    card = cards.card(case.card)
    placement = Placement(make_mesh(cards.topology(card, case.devices), case.pp), case.expert_parallel)
    spec = split.spread(spec_from_hf(config, CONTEXT), degree)
    kv_specs = decoder.kv_specs(spec, "bfloat16")
    return Shapes(
        spec=spec,
        dtype="bfloat16",
        kv_specs=kv_specs,
        num_blocks=tuple(POOL_GIB * 2**30 * case.devices // (16 * kv.bytes_per_token()) for kv in kv_specs),
        block_size=16,
        max_num_seqs=MAX_SEQS,
        max_model_len=CONTEXT,
        max_logprobs=20,
        env=placement.env(card.target()),
        placement=placement,
        most_tokens=max(case.tokens, 2048 // case.pp),
    )


@functools.cache
def read(case: Case) -> Read:
    config = json.loads((CONFIGS / f"{case.model}.json").read_text())
    if case.layers:
        config["num_hidden_layers"] = case.layers
    shapes = make_shapes(case, config)
    program = forward_program(shapes, ForwardKey(case.tokens, min(case.tokens, MAX_SEQS)))
    done = deviceless.compile(
        program.function,
        *program.arguments,
        card=case.card,
        devices=case.devices,
        donate=program.donate,
        dump_ptx=True,
        kernel="none of them",
    )
    (pool,) = shapes.pools()
    local = pool.sharding.shard_shape(pool.shape)
    return Read(
        layers=len(shapes.spec.layers),
        instructions=hlo.entry(done.text),
        thunks=done.thunks,
        pool_shape=f"bf16[{','.join(map(str, local))}]",
        pool_bytes=jnp.dtype(pool.dtype).itemsize * pool.size // case.devices,
        alias_bytes=done.memory.alias_size_in_bytes,
        argument_bytes=done.memory.argument_size_in_bytes,
        temporary_bytes=done.memory.temp_size_in_bytes,
    )
