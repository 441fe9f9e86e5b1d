"""Sections of benchmarks/gpu.py that go wrong in every way."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.gpu_parts.session import Session


def raises(s: Session) -> dict[str, Any]:
    s.add(figure=1)
    with s.attempt("one case"):
        raise ValueError("a case's error")
    s.add(figure=2)
    raise KeyError("the section's error")


def aborts(s: Session) -> dict[str, Any]:
    s.add(figure=1)
    with s.attempt("a bad kernel"):
        os.abort()
    return {}


def hangs(s: Session) -> dict[str, Any]:
    with s.attempt("a deadlock"):
        time.sleep(600)
    return {}


def slow(s: Session) -> dict[str, Any]:
    s.deadline = time.monotonic() + 2
    for case in s.cases([1, 2, 3, 4], str):
        time.sleep(0.4 * s.left())
        s.add(case=case)
    return {}
