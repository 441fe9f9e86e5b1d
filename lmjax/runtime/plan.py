"""``lmjax plan``: whether and how a model fits a card, or several, found on a machine that has none.

XLA compiles three programs for a few layers (see ``plan_layers``) and says what they need beside their arguments; the
arguments are arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lmjax.config import ConfigError, EngineConfig
from lmjax.models import decoder
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.parallel.split import Degree, degrees, share
from lmjax.runtime.buckets import FULL, Buckets, ForwardKey, SampleKey
from lmjax.runtime.cards import DEVICES_PER_HOST, Card, topology
from lmjax.runtime.compiler import Program, compile_all
from lmjax.runtime.hlo import Launches
from lmjax.runtime.memory import GIB, KVPlan, gib, plan_kv, pool_is_set
from lmjax.runtime.plan_costs import Step, Weights, bytes_per_device, roofline, weights_of
from lmjax.runtime.plan_layers import Cut, cut, scale
from lmjax.runtime.platform import no_compilation_cache
from lmjax.runtime.programs import Shapes, forward_program, sample_program
from lmjax.runtime.resolve import ProgramMemory, Resolved, attention_bodies, make_spec, resolve, spread_spec, step_bytes
from lmjax.weights.source import ModelSource

MOST_DEVICES = 64
# what XLA does not count: the CUDA context, NCCL's buffers, cuBLAS workspaces, CUDA graphs, fragmentation
RESERVE_BYTES, RESERVE_SHARE = 3 * GIB // 2, 0.03

Kind = Literal["sample", "prefill", "decode"]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class ProgramPlan:
    """One program on one device, in bytes. ``peak``: arguments, temporaries and outputs, updated arguments once.

    ``launches`` are the whole model's. ``step``: of as many rows of ``context`` tokens as the program and the pool hold
    (prefill: of its tokens, from the start of a prompt).
    """

    name: str
    kind: Kind
    arguments: int
    temporaries: int
    outputs: int
    launches: Launches
    kernels_per_layer: float | None = None
    rows: int = 0
    context: int = 0
    step: Step | None = None

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs


@dataclass(frozen=True)
class Plan:
    """Bytes are per device. ``programs``: the largest of each kind; those of smaller buckets need less.

    ``room``: what is left for the KV pool. ``refusal``: why the model does not fit, None where it does; ``smallest``:
    then, the plan of the smallest mesh that fits, if one does.
    """

    model: str
    card: Card
    degree: Degree
    dtype: str
    kv_dtype: str
    attention: tuple[str, ...]  # by KV group: "triton", "mosaic" or "xla"
    block_size: int
    usable: int
    reserve: int
    weights: int
    adapters: int
    state: int
    program_bytes: int
    room: int
    pool: KVPlan | None
    wanted_len: int  # --max-model-len, or the model's own
    programs: tuple[ProgramPlan, ...] = ()
    length: int = 0
    refusal: str | None = None
    smallest: Plan | None = None

    @property
    def devices(self) -> int:
        return self.degree.devices

    @property
    def concurrency(self) -> float:
        """Requests of ``length`` tokens that the pool holds at once."""
        return self.pool.num_tokens / self.length if self.pool else 0.0


@dataclass(frozen=True)
class Deployment:
    """A model on as many cards as ``degree`` says."""

    config: EngineConfig
    source: ModelSource
    card: Card
    degree: Degree = Degree()

    def resolve(self) -> Resolved:
        """For the devices of a topology. Raises ``ConfigError``."""
        # first, since a topology takes its time: what no card would help
        spread_spec(make_spec(self.source, self.config.max_model_len), self.degree)
        mesh = make_mesh(topology(self.card, self.degree.devices), self.degree.pp)
        placement = Placement(mesh, self.degree.expert_parallel)
        env = placement.env(self.card.target(), self.config.attention_backend)  # type: ignore[arg-type]
        return resolve(self.config, self.source, "gpu", env, placement)


def make_plan(deployment: Deployment, length: int | None, tell: Tell) -> Plan:
    """length: of the requests that concurrency and decode steps are told for (default: the context length).

    Raises ``ConfigError`` for settings that no number of cards would help.
    """
    resolved = deployment.resolve()
    if length is not None and length > resolved.spec.max_len:
        raise ConfigError(f"--length: got {length}, the context is {resolved.spec.max_len} tokens")
    if pool_is_set(deployment.config):
        _plan_kv(resolved, sys.maxsize)  # a pool that is too small on any card
    found = _plan(deployment, length, tell)
    if found.refusal is None:
        return found
    return replace(found, smallest=_smallest(deployment, length, tell))


def _smallest(deployment: Deployment, length: int | None, tell: Tell) -> Plan | None:
    spec = make_spec(deployment.source, deployment.config.max_model_len)
    degree = deployment.degree
    for tp in degrees(spec, degree.expert_parallel, MOST_DEVICES // degree.pp):
        devices = tp * degree.pp
        if tp <= degree.tp or (devices > DEVICES_PER_HOST and devices % DEVICES_PER_HOST):
            continue
        found = _plan(replace(deployment, degree=replace(degree, tp=tp)), length, tell)
        if found.refusal is None:
            return found
    return None


def _plan(deployment: Deployment, length: int | None, tell: Tell) -> Plan:
    resolved = deployment.resolve()
    spec, card, devices = resolved.spec, deployment.card, deployment.degree.devices
    weights = weights_of(spec, resolved.dtype, deployment.degree)
    usable = int(card.memory_bytes * deployment.config.gpu_memory_utilization)
    reserve = RESERVE_BYTES + int(card.memory_bytes * RESERVE_SHARE)
    shapes = resolved.shapes(_one_block(resolved), spec.max_len)
    state, adapters = (bytes_per_device(tree, devices) for tree in (shapes.state(), shapes.loras()))
    # a step in which rows have adapters reads those of all slots, and multiplies them with every token
    extra = adapters // weights.item_bytes
    weights = replace(weights, dense=weights.dense + extra, dense_bytes=weights.dense_bytes + adapters)
    plan = Plan(
        model=spec.model_type,
        card=card,
        degree=deployment.degree,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_specs[0].dtype,
        attention=attention_bodies(resolved),
        block_size=deployment.config.block_size,
        usable=usable,
        reserve=reserve,
        weights=weights.bytes,
        adapters=adapters,
        state=state,
        program_bytes=0,
        room=usable - reserve - weights.bytes - adapters - state,
        pool=None,
        wanted_len=spec.max_len,
        length=length or spec.max_len,
    )
    pool = _size_pool(resolved, plan.room)
    if isinstance(pool, str):  # not even without temporaries: nothing needs to be compiled
        need = gib(usable - plan.room)
        what = "weights, adapters, state" if adapters else "weights, state"
        why = f"{what} and reserve need {need} of the {gib(usable)} that may be used on each card"
        return replace(plan, refusal=why if plan.room <= 0 else pool)
    tell(f"compiling for {devices} x {card.name}")
    shapes = resolved.shapes(pool.num_blocks, pool.max_model_len)
    compiled, program_bytes = _compile(shapes, resolved.buckets(pool.max_model_len), tell)
    plan = replace(plan, program_bytes=program_bytes, room=plan.room - program_bytes)
    pool = _size_pool(resolved, plan.room)
    if isinstance(pool, str):
        return replace(plan, refusal=pool)
    plan = replace(plan, pool=pool, length=length or pool.max_model_len)
    shapes = resolved.shapes(pool.num_blocks, pool.max_model_len)
    programs = tuple(_program_plan(done, shapes, weights, plan) for done in compiled)
    return replace(plan, programs=programs)


def _one_block(resolved: Resolved) -> tuple[int, ...]:
    return tuple(2 for _ in resolved.kv_specs)


def _size_pool(resolved: Resolved, room: int) -> KVPlan | str:
    """The pool, or why there is none."""
    try:
        return _plan_kv(resolved, max(room, 0))
    except ConfigError as error:
        return f"{gib(max(room, 0))} are left for the KV pool: {error}"


def _plan_kv(resolved: Resolved, room: int) -> KVPlan:
    return plan_kv(
        resolved.device_kv_specs,
        resolved.config,
        model_max_len=resolved.spec.max_len,
        max_num_seqs=resolved.num_seqs,
        max_num_batched_tokens=resolved.num_batched,
        budget=room,
        available=room,
    )


@dataclass(frozen=True)
class _Compiled:
    key: ForwardKey | SampleKey
    program: Program
    executable: Any
    small: Cut


def largest_keys(buckets: Buckets) -> tuple[ForwardKey | SampleKey, ...]:
    """The programs that need the most: a step full of prompts, one of decode rows alone, and sampling with all
    features."""
    keys = [key for key in buckets.every_forward if not key.prompt_logprobs]
    keys = [key for key in keys if key.adapters] or keys  # where there are adapters, such a step needs more
    prefill = max(keys, key=lambda key: key.num_tokens)
    decode = max((key for key in keys if key.num_tokens == key.num_rows), key=lambda key: key.num_tokens)
    sample = max(buckets.sample, key=lambda key: (key.num_rows, key.level, key.logprobs))
    assert sample.level == FULL
    return tuple(dict.fromkeys((sample, prefill, decode)))


def _compile(shapes: Shapes, buckets: Buckets, tell: Tell) -> tuple[list[_Compiled], int]:
    """The largest programs, and what the one that needs most needs beside its arguments."""
    small = cut(shapes)
    programs: dict[Hashable, Program] = {
        key: sample_program(shapes, key) if isinstance(key, SampleKey) else forward_program(small.shapes, key)
        for key in largest_keys(buckets)
    }
    with no_compilation_cache():
        done = compile_all(programs, tell)
    found = [_Compiled(key, programs[key], done[key], small) for key in programs]  # type: ignore[arg-type]
    return found, step_bytes(shapes, {c.key: ProgramMemory.of(c.executable) for c in found})


def _program_plan(done: _Compiled, shapes: Shapes, weights: Weights, plan: Plan) -> ProgramPlan:
    key, memory = done.key, ProgramMemory.of(done.executable)
    whole = sample_program(shapes, key) if isinstance(key, SampleKey) else forward_program(shapes, key)
    found = ProgramPlan(
        name=key.name,
        kind=_kind(key),
        arguments=bytes_per_device(whole.arguments, plan.devices),
        temporaries=memory.temporaries,
        outputs=memory.outputs,
        launches=Launches(0, (), 0),
    )
    counted = scale(done.executable.as_text(), done.small.kept, shapes.spec)
    if isinstance(key, SampleKey):
        return replace(found, launches=counted.whole)
    assert plan.pool is not None
    decode = found.kind == "decode"
    rows = max(1, min(key.num_rows, int(plan.concurrency) // plan.degree.pp)) if decode else 1
    context = plan.length if decode else key.num_tokens
    spec = share(shapes.spec, plan.degree)
    step = roofline(
        plan.card,
        weights,
        spec,
        decoder.kv_specs(spec, plan.kv_dtype),
        tokens=rows if decode else key.num_tokens,
        rows=rows,
        context=context if decode else context / 2,
        collectives=counted.whole.collectives,
        devices=plan.degree.tp if plan.degree.tp > 1 else plan.degree.pp,
    )
    return replace(
        found,
        launches=counted.whole,
        kernels_per_layer=counted.kernels_per_layer,
        rows=rows,
        context=context,
        step=step,
    )


def _kind(key: ForwardKey | SampleKey) -> Kind:
    if isinstance(key, SampleKey):
        return "sample"
    return "decode" if key.num_tokens == key.num_rows else "prefill"
