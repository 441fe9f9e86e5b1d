"""benchmarks/gpu.py on a CPU: what it imports, that it runs, and what it makes of sections that don't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).resolve().parent.parent.parent
# seen by every process of a run: after jax and flax are in, nothing but this repository and the standard library is
BLOCK = """
import importlib.abc
import sys

if sys.argv[-1] not in ("small", "full"):  # the peer may have all it wants
    import flax.struct, jax, numpy

    KNOWN = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
    KNOWN |= {"benchmarks", "lmjax", "pallas_kernels", "scipy"}  # scipy: jax's own

    class Block(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in KNOWN:
                raise ModuleNotFoundError(f"{name} may not be there on a card's machine")

    sys.meta_path.insert(0, Block())
"""


def run(tmp_path: Path, sections: str) -> dict:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--interpret", "--small", "--json", str(out)]
    done = subprocess.run(
        [*command, "--sections", sections],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert list(found["sections"]) == sections.split(",")
    for name, section in found["sections"].items():
        assert not section.get("error") and not section.get("failed"), (name, section)
        assert section["rows"] or section["skipped"], name
        assert gpu.TITLES[name] in done.stdout
    assert not list((ROOT / "pallas_kernels" / "tuned").glob("*.json"))  # an interpreter's winners are none
    return found


def test_sections_run_without_other_packages(tmp_path):
    found = run(tmp_path, "card,peaks,step,quant")
    assert {"copy", "read", "bfloat16"} <= set(found["peaks"])
    row = found["sections"]["step"]["rows"][-1]
    assert row["step_us"] > 0 and row["submit_us"] > 0 and row["roofline_us"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_run(tmp_path):
    found = run(tmp_path, ",".join(section.name for section in gpu.SECTIONS))
    assert found["seconds"] < 300
    assert {row["op"] for row in found["sections"]["sweep"]["rows"]} == {
        "grouped_matmul",
        "paged_decode",
        "paged_prefill",
        "quant_matmul",
    }


def broken(name: str, share: int = 30, least: int = 0) -> gpu.Section:
    return gpu.Section(name, f"tests.broken_sections:{name}", share, least)


def test_a_section_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 1)
    args = gpu.parse(["--interpret", "--small", "--budget-s", "100"])
    it = gpu.Run(args, tmp_path)
    try:
        for name in ("raises", "aborts", "slow"):
            it.section(broken(name))
        it.budget = 0  # of what is left, a section gets all
        it.section(broken("never", least=1))
        it.budget = 480
        it.options["interpret"] = False  # a share of its own
        it._worker.stop()
        it._worker = gpu.Worker({"interpret": True, "small": True}, {}, tmp_path)
        it.section(broken("hangs", share=1))
    finally:
        it.stop()
    results = it.results
    assert results["raises"]["rows"] == [{"figure": 1}, {"figure": 2}]
    assert results["raises"]["failed"] == ["one case: broken_sections.py:15 ValueError: a case's error"]
    assert results["raises"]["error"].startswith("broken_sections.py:17 KeyError")
    assert results["aborts"]["rows"] == [{"figure": 1}]
    assert results["aborts"]["error"] == "its process ended with exit code -6, at a bad kernel"
    assert len(results["slow"]["rows"]) < 4 and "no time left" in results["slow"]["skipped"][-1]
    assert results["never"] == {"skipped": ["all of it: 0 s left"]}
    assert results["hangs"]["error"] == "no answer after 2 s, at a deadlock"
    assert it.failed
    text = gpu.report(dict.fromkeys(gpu.TITLES, results["aborts"]), interpret=False)
    assert "failed: its process ended" in text and "figure" in text


def test_no_card_is_said():
    command_line = [sys.executable, "-m", "benchmarks.gpu", "--small", "--sections", "card"]
    done = subprocess.run(
        command_line, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "no NVIDIA card" in done.stdout


def test_what_a_card_leaves_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "HERE", tmp_path / "benchmarks")
    table = tmp_path / "pallas_kernels" / "tuned" / "sm_90.json"
    table.parent.mkdir(parents=True)
    table.write_text(json.dumps({"quant_matmul": {"old": {"block_n": 1}}, "other": {"case": {}}}))
    (tmp_path / "autotune.0.txtpb").write_text("version: 3\nresults {\n  device: 1\n}\n")
    (tmp_path / "autotune.1.txtpb").write_text("version: 3\nresults {\n  device: 2\n}\n")
    it = gpu.Run(gpu.parse([]), tmp_path)
    it.results = {
        "card": {"rows": [{"device": "NVIDIA H200", "capability": "9.0"}], "target_config": "gpu_device_info {}"},
        "sweep": {"rows": [], "tuned": {"quant_matmul": {"new": {"block_n": 2}}}},
    }
    gpu.save(it, tmp_path, None)
    results = tmp_path / "benchmarks" / "results"
    assert (results / "gpu_nvidia-h200.target_config.txtpb").read_text() == "gpu_device_info {}"
    autotuned = (results / "gpu_nvidia-h200.autotune.txtpb").read_text()
    assert autotuned.count("version") == 1 and autotuned.count("results {") == 2
    assert json.loads(table.read_text()) == {
        "other": {"case": {}},
        "quant_matmul": {"new": {"block_n": 2}, "old": {"block_n": 1}},
    }
    assert json.loads((results / "gpu_nvidia-h200.json").read_text())["sections"]["card"]["rows"]


def test_table():
    rows = [{"a": 1, "b": 0.123456}, {"a": 100, "b": 1234.5}, {"c": "x"}]
    assert gpu.table(rows) == "  a       b\n  1   0.123\n100  1234.5\nc\nx"
    assert gpu.table([]) == ""
