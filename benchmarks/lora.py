"""What adapters cost: a batch with eight of them in the mix against the same batch of the base model.

    python -m benchmarks.lora [--rounds 6] [--batch 16] [--adapters 8] [--rank 16] [--new-tokens 32] [--output FILE]

The embedded model (SmolLM2-135M) with random adapters of all its linears. One engine, the same prompts with adapters
and without, interleaved A B A B: steps without an adapter run on programs that have none, as without ``--enable-lora``.
Ratios are throughputs, with adapters over without.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def write_adapters(config: dict[str, Any], folder: Path, count: int, rank: int) -> dict[str, str]:
    """PEFT directories of all linears of a Llama."""
    from safetensors.numpy import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = {}
    for i in range(count):
        rng, tensors = np.random.default_rng(i), {}
        for layer in range(config["num_hidden_layers"]):
            for name, (rows, columns) in shapes.items():
                module = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rank, columns), np.float32) / columns**0.5
                tensors[f"{module}.lora_B.weight"] = rng.standard_normal((rows, rank), np.float32) * np.float32(0.01)
        path = folder / f"adapter{i}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        modules = [name.rpartition(".")[2] for name in shapes]
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        (path / "adapter_config.json").write_text(json.dumps(settings))
        found[path.name] = str(path)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from lmjax import LLM, SamplingParams
    from lmjax.weights.source import resolve_model

    rng = random.Random(3)
    prompts = [[rng.randrange(10, 40000) for _ in range(24)] for _ in range(args.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(resolve_model("smollm2").config, Path(folder), args.adapters, args.rank)
        llm = LLM(
            "smollm2",
            enable_lora=True,
            max_loras=args.adapters,
            max_lora_rank=args.rank,
            lora_modules=adapters,
            max_num_seqs=args.batch,
            max_num_batched_tokens=max(64, args.batch),
            max_model_len=256,
            enable_prefix_caching=False,
        )
    names = [*adapters]
    mix = [names[i % len(names)] for i in range(args.batch)]

    def seconds(lora: list[str] | None) -> tuple[float, float]:
        """On the clock, and of all threads."""
        start, work = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, use_tqdm=False, lora=lora)
        return time.perf_counter() - start, time.process_time() - work

    seconds(None), seconds(mix)  # adapters get their slots
    pairs = [(seconds(None), seconds(mix)) for _ in range(args.rounds)]
    compiles = llm.stats().compiles
    llm.close()
    wall, work = ([without[i] / with_adapters[i] for without, with_adapters in pairs] for i in (0, 1))
    tokens = args.batch * args.new_tokens
    return {
        "batch": args.batch,
        "adapters": args.adapters,
        "rank": args.rank,
        "new_tokens": args.new_tokens,
        "ratio_median": round(statistics.median(wall), 3),
        "ratio_min": round(min(wall), 3),
        "ratio_max": round(max(wall), 3),
        "cpu_seconds_ratio_median": round(statistics.median(work), 3),  # for a machine that others use, too
        "tokens_per_second_without": [round(tokens / without[0], 1) for without, _ in pairs],
        "tokens_per_second_with": [round(tokens / with_adapters[0], 1) for _, with_adapters in pairs],
        "compiles_after_ready": compiles,
    }


def main() -> None:
    import jax

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="pairs")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/lora.json"))
    args = parser.parse_args()
    result = {"jax": jax.__version__, "machine": platform.processor() or platform.machine()} | measure(args)
    print(json.dumps(result, indent=2))
    args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
