"""What the card can do at best, and what it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import jaxlib

from benchmarks.gpu_parts.session import Session, bind, compiled, randoms


def card(s: Session) -> dict[str, Any]:
    """Versions, memory and, on a card, XLA's own description of it: what ``lmjax compile`` can take for another box."""
    device = jax.devices()[0]
    s.add(
        device=device.device_kind,
        capability=".".join(map(str, s.target.capability)),
        cores=s.target.cores,
        memory_gib=(device.memory_stats() or {}).get("bytes_limit", 0) / 2**30,
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        backend=jax.extend.backend.get_backend().platform_version.replace("\n", " "),
    )
    if device.platform == "cpu":
        s.skipped.append("target_config: no card")
        return {}
    from jax._src.lib import xla_client

    return {"target_config": str(xla_client.get_topology_for_devices(jax.devices()).target_config)}


def peaks(s: Session) -> dict[str, Any]:
    """Copy: bytes read + written of ``x + 1``. Read: a sum. Products of square matrices, float32 results."""
    size = s.pick(2**29, 2**18)
    x = randoms((size,), jnp.bfloat16)
    copy = compiled(lambda x: x + jnp.bfloat16(1), x)
    read = compiled(lambda x: x.astype(jnp.float32).sum(), x)
    times = s.race({"copy": bind(copy, x), "read": bind(read, x)})
    found = {"copy": 4 * size / times["copy"], "read": 2 * size / times["read"]}
    for name, value in found.items():
        s.add(what=name, gb_s=value / 1e9)
    n = s.pick(8192, 128)
    kinds = ["bfloat16", "float16", "int8"] + (["float8_e4m3fn"] if s.target.has_fp8 else [])
    for kind in s.cases(kinds, str):
        a, b = randoms((n, n), kind, 1), randoms((n, n), kind, 2)
        total = jnp.int32 if kind == "int8" else jnp.float32
        product = compiled(lambda a, b, total=total: jax.lax.dot(a, b, preferred_element_type=total), a, b)
        found[kind] = 2 * n**3 / s.seconds(bind(product, a, b))
        s.add(what=f"matmul {kind}", tflop_s=found[kind] / 1e12)
    s.peaks.update(found)
    return {"peaks": found}
