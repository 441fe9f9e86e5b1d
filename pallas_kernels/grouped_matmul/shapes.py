"""Named cases of grouped_matmul, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    experts: int  # E
    top_k: int
    hidden: int  # D
    ffn: int  # F of one expert


MODELS = {
    "mixtral-8x7b": Experts(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Experts(128, 8, 2048, 768),
    "qwen1.5-moe": Experts(60, 4, 2048, 1408),
    "gpt-oss-20b": Experts(32, 4, 2880, 2880),
}
TOKENS = (64, 2048)
# adapters, rank, in, out
LORA = {"r8": (8, 8, 4096, 4096), "r16": (8, 16, 4096, 6144), "r64": (4, 64, 4096, 28672)}
WEIGHTS = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")


def rows_dtype(weights: str) -> str:
    """The type of the rows beside matrices of a type."""
    return weights if weights in ("float16", "float32") else "bfloat16"
