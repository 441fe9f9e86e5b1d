"""Every Python block of README.md and docs/ runs as it stands: in a new namespace, an empty folder, on a CPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.blocks import ALL, ROOT, Block

NEEDS = {"lm_eval": "the harness is missing: pip install 'lmjax[eval]'"}
PYTHON = [block for block in ALL if block.language == "python"]


def is_slow(block: Block) -> bool:
    """Left to ``make test-all``: those that load the embedded model (10 to 20 seconds each), and those that run a whole
    example (up to a minute; tests/examples runs them, too)."""
    loads = '"smollm2"' in block.text and 'load_format="dummy"' not in block.text
    return loads or "from examples import" in block.text


@functools.cache
def outcomes(slow: bool) -> tuple[dict[str, str | None], str]:
    """The error of each block that was run, and what their process printed. One for all: jax starts once, and equal
    engines are compiled once."""
    names = [str(b) for b in PYTHON if is_slow(b) == slow and missing(b) is None]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.jsonl")
        work = Path(folder, "work")
        work.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "tests.docs.run_python", str(report), *names],
            cwd=work,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=840,
        )
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return {line["block"]: line["error"] for line in lines}, done.stdout


def missing(block: Block) -> str | None:
    """Why it cannot run here."""
    for package, reason in NEEDS.items():
        if f"import {package}" in block.text and importlib.util.find_spec(package) is None:
            return reason
    return None


@pytest.mark.timeout(900)  # the first waits for all
@pytest.mark.parametrize(
    "block", [pytest.param(b, id=str(b), marks=[pytest.mark.slow] if is_slow(b) else []) for b in PYTHON]
)
def test_it_runs(block):
    if reason := missing(block):
        pytest.skip(reason)
    errors, output = outcomes(is_slow(block))
    assert str(block) in errors, f"its process ended before it did\n{output[-4000:]}"
    assert errors[str(block)] is None, f"{errors[str(block)]}\n{output[-2000:]}"


@pytest.mark.timeout(900)
def test_nothing_is_compiled_once_an_engine_is_ready():
    assert "please report this" not in outcomes(False)[1]


@pytest.mark.parametrize("block", [pytest.param(b, id=str(b)) for b in PYTHON if b.page == "docs/pipelines.md"])
def test_a_pipeline_takes_less_than_20_lines(block):
    assert sum(bool(line.strip()) for line in block.text.splitlines()) < 20
