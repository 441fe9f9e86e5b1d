"""A plan as text, and as JSON."""

from __future__ import annotations

from typing import Any

from lmjax.runtime.memory import gib
from lmjax.runtime.plan import Plan, ProgramPlan

NOTE = """\
Compiled for the card, not run on one: bytes are XLA's, launches those of programs that were not tuned on it, times the
least that the card's data sheet allows."""


def to_json(plan: Plan) -> dict[str, Any]:
    """Bytes per device, seconds."""
    return {
        "fits": plan.refusal is None,
        "refusal": plan.refusal,
        "model_type": plan.model,
        "device": plan.card.name,
        "tensor_parallel_size": plan.degree.tp,
        "pipeline_parallel_size": plan.degree.pp,
        "expert_parallel": plan.degree.expert_parallel,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_dtype,
        "attention": plan.attention,
        "memory_bytes": plan.card.memory_bytes,
        "usable_bytes": plan.usable,
        "reserve_bytes": plan.reserve,
        "weight_bytes": plan.weights,
        "adapter_bytes": plan.adapters,
        "state_bytes": plan.state,
        "program_bytes": plan.program_bytes,
        "kv_room_bytes": max(plan.room, 0),
        "kv_pool_bytes": plan.pool.num_bytes if plan.pool else 0,
        "kv_tokens": plan.pool.num_tokens if plan.pool else 0,
        "num_blocks": plan.pool.num_blocks if plan.pool else (),
        "max_model_len": plan.pool.max_model_len if plan.pool else 0,
        "length": plan.length,
        "concurrency": plan.concurrency,
        "programs": [_program_json(program) for program in plan.programs],
        "smallest": to_json(plan.smallest) if plan.smallest else None,
    }


def _program_json(program: ProgramPlan) -> dict[str, Any]:
    launches, step = program.launches, program.step
    return {
        "name": program.name,
        "kind": program.kind,
        "argument_bytes": program.arguments,
        "temporary_bytes": program.temporaries,
        "output_bytes": program.outputs,
        "peak_bytes": program.peak,
        "kernels": launches.kernels,
        "kernels_per_layer": program.kernels_per_layer,
        "collectives": len(launches.collectives),
        "collective_bytes": launches.collective_bytes,
        "host_loops": launches.loops,
        "roofline": step
        and {
            "rows": program.rows,
            "context": program.context,
            "seconds": step.seconds,
            "bound": step.bound,
            "memory_seconds": step.memory_seconds,
            "compute_seconds": step.compute_seconds,
            "link_seconds": step.link_seconds,
        },
    }


def to_text(plan: Plan) -> str:
    lines = [_title(plan), *_memory(plan)]
    if plan.refusal:
        lines += ["", f"DOES NOT FIT: {plan.refusal}", *_smallest(plan)]
    if plan.pool:
        lines += ["", *_pool(plan), "", *_table(plan.programs), "", *_steps(plan)]
    return "\n".join([*lines, "", NOTE]) + "\n"


def _title(plan: Plan) -> str:
    degree = plan.degree
    how = f" in {degree.pp} stages" if degree.pp > 1 else ""
    how += ", experts spread" if degree.expert_parallel else ""
    return f"{plan.model} on {plan.devices} x {plan.card.name}{how}: {plan.dtype} weights, {plan.kv_dtype} KV cache"


def _memory(plan: Plan) -> list[str]:
    rows = [
        ("memory of the card", plan.card.memory_bytes, ""),
        ("usable", plan.usable, "--gpu-memory-utilization"),
        ("reserve", plan.reserve, "CUDA context, NCCL, workspaces, graphs: what XLA does not count"),
        ("weights", plan.weights, ""),
        *([("adapters", plan.adapters, "all slots: --max-loras, --max-lora-rank")] if plan.adapters else []),
        ("state", plan.state, "token and block tables, sampling state"),
        ("programs", plan.program_bytes, "temporaries of the largest, outputs of two steps in flight"),
        ("room for KV", max(plan.room, 0), ""),
    ]
    return ["per device", *(f"  {name:<20}{gib(size):>12}  {note}".rstrip() for name, size, note in rows)]


def _smallest(plan: Plan) -> list[str]:
    found = plan.smallest
    if found is None or found.pool is None:
        return ["No number of these cards that divides this model fits it."]
    return [
        f"Smallest that fits: --tensor-parallel-size {found.degree.tp}, with {gib(found.room)} a device for KV: "
        f"{found.pool.num_tokens:,} tokens, {found.concurrency:.1f} requests of {found.length:,}."
        + ("" if found.pool.max_model_len == found.wanted_len else f" ({found.wanted_len:,} are wanted.)")
    ]


def _pool(plan: Plan) -> list[str]:
    pool = plan.pool
    assert pool is not None
    cut = "" if pool.max_model_len == plan.wanted_len else f" ({plan.wanted_len:,} are wanted; the pool holds no more)"
    return [
        f"KV pool: {gib(pool.num_bytes)} a device, {pool.num_tokens:,} tokens in blocks of {plan.block_size}",
        f"context: up to {pool.max_model_len:,} tokens{cut}",
        f"concurrency: {plan.concurrency:.1f} requests of {plan.length:,} tokens",
        *(["attention: in XLA form, without a kernel, far from its least time"] if "xla" in plan.attention else []),
    ]


_HEADS = ("program", "args", "temp", "out", "peak", "kernels", "a layer", "collectives", "sent", "host loops")


def _table(programs: tuple[ProgramPlan, ...]) -> list[str]:
    rows = [_HEADS, *(_row(program) for program in programs)]
    first, *others = (max(len(row[i]) for row in rows) for i in range(len(_HEADS)))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]


def _row(program: ProgramPlan) -> tuple[str, ...]:
    launches, layer = program.launches, program.kernels_per_layer
    return (
        program.name,
        gib(program.arguments),
        gib(program.temporaries),
        gib(program.outputs),
        gib(program.peak),
        str(launches.kernels),
        "-" if layer is None else f"{layer:.1f}",
        str(len(launches.collectives)),
        gib(launches.collective_bytes) if launches.collectives else "-",
        str(launches.loops),
    )


def _steps(plan: Plan) -> list[str]:
    stages = plan.degree.pp
    lines = ["least time of a step" if stages == 1 else f"least time of a tick (a request is in one of {stages})"]
    for program in plan.programs:
        step = program.step
        if step is None:
            continue
        if program.kind == "decode":
            what = f"decode, {program.rows} x {program.context:,} tokens"
            rate = f"{program.rows / step.seconds:,.0f} tokens/s"
        else:
            what = f"prefill, {program.context:,} tokens"
            rate = f"{program.context / step.seconds:,.0f} tokens/s"
        lines.append(f"  {what:<34}{step.seconds * 1e3:9.2f} ms  {rate:>18}  bound by {step.bound}")
    return lines
