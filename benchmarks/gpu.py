"""What one NVIDIA card does with lmjax's kernels and programs, in under 8 minutes.

    python -m benchmarks.gpu                        on a card
    python -m benchmarks.gpu --interpret --small    the same code on a CPU, at tiny sizes: shows that it runs

Needs jax with its CUDA plugin, numpy, flax and this repository. Sections run in the order of their worth, each with a
share of ``--budget-s``; what does not fit is listed as skipped. They run in a process of their own that is started anew
when one crashed or hung, so that the others still run. Written beside the table: a JSON file with every figure, XLA's
autotuning results and its description of the card (for ``lmjax compile``), and the tiles that won
(``pallas_kernels/tuned/``).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from lmjax.runtime import gpu_settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS = "benchmarks.gpu_parts."
GRACE = 15  # seconds that a section may take beyond its share before it counts as hung


class Section(NamedTuple):
    name: str
    function: str  # module:function
    share: int  # most seconds, of 480
    least: int  # seconds below which it is not begun


SECTIONS = (
    Section("card", PARTS + "peaks:card", 20, 5),
    Section("peaks", PARTS + "peaks:peaks", 30, 10),
    Section("check", PARTS + "check:check", 80, 20),
    Section("decode", PARTS + "attention:decode", 50, 20),
    Section("step", PARTS + "step:step", 100, 30),
    Section("prefill", PARTS + "attention:prefill", 30, 15),
    Section("graphs", PARTS + "step:graphs", 30, 15),
    Section("quant", PARTS + "matmuls:quant", 40, 15),
    Section("grouped", PARTS + "matmuls:grouped", 30, 15),
    Section("sweep", PARTS + "sweep:sweep", 60, 20),
    Section("peer", "", 60, 40),
)
TITLES = {
    "card": "The card",
    "peaks": "Peaks of this card",
    "check": "Kernels against their XLA forms: largest difference over the largest value",
    "decode": "Paged attention, decode rows (N = 32, K = 8, H = 128), one layer",
    "step": "Decode step of Llama-3.1-8B's shape, random weights",
    "prefill": "Paged attention, prefill rows, one layer",
    "graphs": "Command buffers on and off",
    "quant": "Quantised products against bfloat16's",
    "grouped": "A layer of experts",
    "sweep": "Tiles",
    "peer": "transformers, paged continuous batching, the same decode step",
}


class Worker:
    """The process that runs sections."""

    def __init__(self, options: dict[str, Any], peaks: dict[str, float], autotune: Path):
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if options["interpret"]:
            env["JAX_PLATFORMS"] = "cpu"
        else:
            gpu_settings.apply(0.9, env)  # as in serving
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_gpu_dump_autotune_results_to={autotune}".strip()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_parts.worker", json.dumps(options | {"peaks": peaks})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, section: Section, seconds: float) -> dict[str, Any]:
        """The section's answer with its rows; {"error": ..., "healthy": False} and the rows so far where none came."""
        assert self.process.stdin
        rows: list[Any] = []
        at, end = "", time.monotonic() + seconds + GRACE
        try:
            self.process.stdin.write(json.dumps({"section": section.function, "seconds": seconds}) + "\n")
            self.process.stdin.flush()
            while line := self._lines.get(timeout=max(end - time.monotonic(), 0)):
                message = json.loads(line)
                if "healthy" in message:
                    return message | {"rows": rows}
                at = message.get("at", at)
                rows += [message["row"]] if "row" in message else []
            error = f"its process ended with exit code {self.process.wait()}"
        except queue.Empty:
            error = f"no answer after {seconds + GRACE:.0f} s"
        except BrokenPipeError:
            error = f"its process ended with exit code {self.process.wait()}"
        return {"error": error + (f", at {at}" if at else ""), "rows": rows, "healthy": False}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Run:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.options = {"interpret": args.interpret, "small": args.small}
        self.begin = time.monotonic()
        self.budget = args.budget_s
        self.peaks: dict[str, float] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._worker: Worker | None = None
        self._num_workers = 0

    def section(self, section: Section) -> None:
        begin = time.monotonic()
        left = self.budget - (begin - self.begin)
        if left < section.least:
            self.results[section.name] = {"skipped": [f"all of it: {max(left, 0):.0f} s left"]}
            return
        # a CPU is slow and has no one waiting: what is left is a section's to take
        share = left if self.options["interpret"] else min(section.share * self.budget / 480, left)
        print(f"{section.name} ({left:.0f} s left)", file=sys.stderr, flush=True)
        result = self._ask(section, share) if section.function else self._peer(share)
        self.peaks.update(result.get("peaks", {}))
        self.results[section.name] = result | {"seconds": round(time.monotonic() - begin, 1)}
        if result.get("error"):
            print(f"  {result['error']}", file=sys.stderr, flush=True)

    def _ask(self, section: Section, seconds: float) -> dict[str, Any]:
        if self._worker is None:
            self._worker = Worker(self.options, self.peaks, self._folder / f"autotune.{self._num_workers}.txtpb")
            self._num_workers += 1
        answer = self._worker.ask(section, seconds)
        if not answer.pop("healthy"):
            self.stop()
        return answer

    def _peer(self, seconds: float) -> dict[str, Any]:
        self.stop()  # it holds the card's memory
        command = [sys.executable, "-m", "benchmarks.gpu_parts.peer", "small" if self.options["small"] else "full"]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer after {seconds + GRACE:.0f} s"}
        if done.returncode or not done.stdout.strip():
            return {"error": f"its process ended with exit code {done.returncode}"}
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        if "row" not in answer:
            return {"skipped": [answer["skipped"]]}
        row = answer["row"]
        ours = [r for r in self.results.get("step", {}).get("rows", []) if r["batch"] == row["batch"]]
        if ours:
            most = max(ours, key=lambda r: r["layers"])
            row |= {"lmjax_step_us": most["step_us"], "speedup": row["step_us"] / most["step_us"]}
        return {"rows": [row]}

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    @property
    def failed(self) -> bool:
        return any(r.get("error") or r.get("failed") for r in self.results.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with equal keys as one aligned table; a new header where the keys change."""
    lines: list[str] = []
    while rows:
        keys = list(rows[0])
        same = next((i for i, row in enumerate(rows) if list(row) != keys), len(rows))
        cells = [keys, *([_cell(row[key]) for key in keys] for row in rows[:same])]
        widths = [max(len(row[i]) for row in cells) for i in range(len(keys))]
        lines += ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
        rows = rows[same:]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def report(results: dict[str, dict[str, Any]], interpret: bool) -> str:
    parts = ["No figure below means anything: the kernels ran in the interpreter, on a CPU."] if interpret else []
    for name, result in results.items():
        lines = [f"## {TITLES[name]}", table(result.get("rows", []))]
        lines += [f"failed: {result['error']}"] if result.get("error") else []
        lines += [f"failed: {line}" for line in result.get("failed", [])]
        lines += [f"skipped: {line}" for line in result.get("skipped", [])]
        parts.append("\n".join(line for line in lines if line))
    return "\n\n".join(parts)


def save(run: Run, folder: Path, json_path: Path | None) -> list[Path]:
    """Writes what the run found; what concerns the card itself only where there was one."""
    card: dict[str, Any] = next(iter(run.results.get("card", {}).get("rows", [])), {})
    name = re.sub(r"[^a-z0-9]+", "-", str(card.get("device", "unknown")).lower()).strip("-")
    target_config = run.results.get("card", {}).pop("target_config", None)
    tuned = run.results.get("sweep", {}).get("tuned", {})
    written = []

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)

    if card and not run.options["interpret"]:
        json_path = json_path or HERE / "results" / f"gpu_{name}.json"
        if target_config:
            write(json_path.with_suffix(".target_config.txtpb"), target_config)
        if autotuned := merge([path.read_text() for path in sorted(folder.glob("autotune.*"))]):
            write(json_path.with_suffix(".autotune.txtpb"), autotuned)
        if tuned:
            path = ROOT / "pallas_kernels" / "tuned" / f"sm_{card['capability'].replace('.', '')}.json"
            before = json.loads(path.read_text()) if path.exists() else {}
            both = {op: before.get(op, {}) | tuned.get(op, {}) for op in sorted({*before, *tuned})}
            write(path, json.dumps(both, indent=1, sort_keys=True) + "\n")
    if json_path:
        facts = {"options": run.options, "budget_s": run.budget, "seconds": round(time.monotonic() - run.begin, 1)}
        write(json_path, json.dumps(facts | {"peaks": run.peaks, "sections": run.results}, indent=1) + "\n")
    return written


def merge(texts: list[str]) -> str:
    """Autotuning results of several processes as one text proto: the version may be said once."""
    lines = [line for i, text in enumerate(texts) for line in text.splitlines() if i == 0 or line[:8] != "version:"]
    return "".join(f"{line}\n" for line in lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="on the CPU, with the kernels in the interpreter")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--budget-s", type=float, default=480, help="seconds in all (480)")
    parser.add_argument("--json", type=Path, help="where the figures go (on a card: benchmarks/results/gpu_CARD.json)")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--sections", default=",".join(names), help=f"which, of {', '.join(names)}")
    args = parser.parse_args(argv)
    args.sections = args.sections.split(",")
    if unknown := [name for name in args.sections if name not in names]:
        parser.error(f"--sections: {unknown[0]!r} is none of {', '.join(names)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """0: every section ran without an error. What was skipped counts as run."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the worker would stay
    with tempfile.TemporaryDirectory() as name:
        run = Run(args, Path(name))
        try:
            for section in SECTIONS:
                if section.name in args.sections:
                    run.section(section)
        finally:
            run.stop()
            written = save(run, Path(name), args.json)
    print(report(run.results, args.interpret))
    print("\n" + "\n".join(f"wrote {path}" for path in written))
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
