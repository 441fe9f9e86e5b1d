"""Loading against ``safetensors.numpy.load_file`` on the same file, and what it takes of memory beside the weights.

    python -m benchmarks.loading [--model DIR] [--rounds 8] [--dtype float32] [--save FILE]

Without --model: SmolLM2-135M in float32 (538 MB), written to a temporary directory. The file is in the page cache.
A round is A B: ours (``weights.loader.load_params``), theirs; ratios are of the same round, above 1: ours is faster.
``load_file`` only reads: no name, shape or value is looked at, nothing is joined (q, k and v; gate and up).
Memory: the growth of RssAnon (peak minus just before) by one load in a fresh process, over the bytes kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


class Growth:
    """How far RssAnon rose above what it was before, at its peak."""

    def __enter__(self) -> Growth:
        self._before = self._peak = rss_anon()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._peak = max(self._peak, rss_anon())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._peak = max(self._peak, rss_anon())

    @property
    def bytes(self) -> int:
        return self._peak - self._before


def rss_anon() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def loader(model: str, dtype: str):
    """() -> parameters, and the checkpoint's files."""
    import jax

    from lmjax.models.registry import spec_from_hf
    from lmjax.weights.loader import load_params
    from lmjax.weights.source import resolve_model

    jax.devices()  # not a part of loading
    source = resolve_model(model)
    spec = spec_from_hf(source.config, None)
    return lambda: load_params(source, spec, dtype), sorted(source.weights.glob("*.safetensors"))


def memory(model: str, dtype: str) -> dict:
    """In this process, which has loaded nothing before."""
    import jax

    load, _ = loader(model, dtype)
    with Growth() as growth:
        params = load()
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"kept_bytes": kept, "grown_bytes": growth.bytes, "ratio": growth.bytes / kept}


def speed(model: str, dtype: str, rounds: int) -> dict:
    import jax
    from safetensors.numpy import load_file

    load, files = loader(model, dtype)
    ways = {"lmjax": load, "load_file": lambda: [load_file(file) for file in files]}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(rounds + 1):
        for way, read in ways.items():
            begin = time.perf_counter()
            found = jax.block_until_ready(read())
            if round_:  # the first fills the page cache
                seconds[way].append(time.perf_counter() - begin)
            del found
    ratios = [theirs / ours for ours, theirs in zip(seconds["lmjax"], seconds["load_file"], strict=True)]
    size = sum(file.stat().st_size for file in files)
    return {
        "bytes": size,
        "gb_per_second": {way: size / 1e9 / statistics.median(times) for way, times in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "rounds": rounds,
    }


def in_a_process(part: str, model: str, dtype: str, rounds: int) -> dict:
    command = [sys.executable, "-m", "benchmarks.loading", "--part", part, "--model", model]
    command += ["--dtype", dtype, "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face directory")
    parser.add_argument("--dtype", default="float32", help="what is kept (default float32)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    parser.add_argument("--part", choices=("speed", "memory"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        figures = speed(args.model, args.dtype, args.rounds) if args.part == "speed" else memory(args.model, args.dtype)
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or str(write_smollm2(Path(directory)))
        found = {part: in_a_process(part, model, args.dtype, args.rounds) for part in ("speed", "memory")}
    s, m = found["speed"], found["memory"]
    rates = ", ".join(f"{way} {rate:.2f} GB/s" for way, rate in s["gb_per_second"].items())
    print(f"{s['bytes'] / 1e6:.0f} MB on {len(os.sched_getaffinity(0))} CPUs: {rates}")
    print(
        f"speed against load_file: {s['ratio']:.2f} "
        f"({s['ratio_range'][0]:.2f} to {s['ratio_range'][1]:.2f}, {s['rounds']} rounds)"
    )
    print(f"RssAnon grew by {m['ratio']:.3f} of the {m['kept_bytes'] / 1e6:.0f} MB kept")
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n")


def write_smollm2(directory: Path) -> Path:
    from lmjax.weights.embedded import export

    export(directory, "float32")
    return directory


if __name__ == "__main__":
    main()
