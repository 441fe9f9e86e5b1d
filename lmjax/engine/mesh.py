"""From a caller's mesh to the engine's devices and degrees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lmjax.config import ConfigError

TP, PP = "tensor_parallel_size", "pipeline_parallel_size"


def from_mesh(mesh: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """``settings`` with both sizes as numbers, and the mesh's devices in the engine's order: stage by stage.

    mesh: a ``jax.sharding.Mesh``; all of its devices become one engine's. A size may be an axis of it by name; the
    other axes must then be of size 1, but for those that the size that was not given takes. Sizes that are numbers cut
    the mesh's devices in their order. Without any: tensor parallel over all devices. Raises ``ConfigError``.
    """
    devices, names = getattr(mesh, "devices", None), tuple(getattr(mesh, "axis_names", ()))
    if not isinstance(devices, np.ndarray) or devices.ndim != len(names) or not devices.size:
        raise ConfigError(f"mesh: got {mesh!r}, must be a jax.sharding.Mesh of devices")
    if len({device.process_index for device in devices.flat}) > 1:
        raise ConfigError("mesh: has devices of several processes; an engine on several hosts is started by --nnodes")
    sizes = {name: settings.get(name) for name in (PP, TP)}
    order: list[int] = []
    for name, value in sizes.items():
        if not isinstance(value, str):
            continue
        if value not in names:
            raise ConfigError(f"{name}: got {value!r}, must be a number or an axis of the mesh: {', '.join(names)}")
        if names.index(value) in order:
            raise ConfigError(f"{name}: got {value!r}, which is {PP} already")
        order.append(names.index(value))
        sizes[name] = devices.shape[order[-1]]
    rest = [i for i in range(len(names)) if i not in order]
    tp, pp = sizes[TP], sizes[PP] or 1
    if tp is None:
        tp = max(devices.size // pp, 1)
    if tp * pp != devices.size:
        raise ConfigError(_unused(mesh, tp, pp, [names[i] for i in rest if devices.shape[i] > 1] if order else []))
    # axes of size 1 may lie anywhere; a named one of stages comes first, a named one within a stage last
    if isinstance(settings.get(TP), str):
        order = [*order[:-1], *rest, order[-1]]
    else:
        order += rest
    return settings | {TP: tp, PP: pp}, tuple(devices.transpose(order).flat)


def _unused(mesh: Any, tp: int, pp: int, left: list[str]) -> str:
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    message = f"mesh: has {math.prod(mesh.shape.values())} devices ({shape}), but {TP} {tp} x {PP} {pp} are {tp * pp}"
    if left:
        message += f"; axis {', '.join(left)} is left over: give each replica an LLM on its own part of the mesh"
    return message
