"""Runs sections in a process that may crash: a bad kernel can abort it or leave its CUDA context useless.

One JSON object a line on stdin: ``{"section": "module:function", "seconds": 30}``. Lines back: ``{"row": ...}`` for
each figure, ``{"at": ...}`` for what is being done, and ``{"healthy": ..., ...}`` when the section is done.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_parts.session import open_session, where


def run(
    section: str, seconds: float, options: dict[str, Any], peaks: dict[str, float], emit: Callable[[Any], None]
) -> dict[str, Any]:
    """The section's notes; ``error`` where it did not run to its end. ``peaks`` is updated."""
    module, function = section.split(":")
    answer: dict[str, Any] = {}
    try:
        session = open_session(options, peaks)
    except RuntimeError as error:
        return {"skipped": [], "failed": [], "error": str(error)}
    session.emit = emit
    session.deadline = time.monotonic() + seconds
    try:
        answer = getattr(importlib.import_module(module), function)(session)
    except Exception as error:
        answer = {"error": where(error)}
    peaks.update(session.peaks)
    return {"skipped": session.skipped, "failed": session.failed, **answer}


def healthy() -> bool:
    """After some errors no CUDA call works any more."""
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except Exception:
        return False


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    warnings.filterwarnings("ignore", message=".*Pallas Triton.*", category=DeprecationWarning)
    options = json.loads(sys.argv[1])
    # as in serving: weights and pool fill the card, and XLA would recompute activations to save memory there
    jax.config.update("jax_compiler_enable_remat_pass", False)
    peaks: dict[str, float] = options.pop("peaks")

    def emit(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    for line in sys.stdin:
        request = json.loads(line)
        answer = run(request["section"], request["seconds"], options, peaks, emit)
        gc.collect()
        emit(answer | {"healthy": not (answer.get("error") or answer["failed"]) or healthy()})


if __name__ == "__main__":
    main()
