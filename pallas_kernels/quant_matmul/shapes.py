"""Named cases of quant_matmul, shared by tests and benchmarks."""

from __future__ import annotations

# K, N
LLAMA_8B = {"qkv": (4096, 6144), "gate_up": (4096, 28672), "down": (14336, 4096)}
ODD = (1000, 520)  # no tile divides them, nor does any group K
TOKENS = (1, 16, 64, 512)
# kind, group (0: all of K), symmetric
FORMATS: dict[str, tuple[str, int, bool]] = {
    "int4-g32": ("int4", 32, True),
    "int4-g64": ("int4", 64, True),
    "int4-g128": ("int4", 128, True),
    "int4-g128-zero": ("int4", 128, False),
    "int4-g32-zero": ("int4", 32, False),
    "int4-all": ("int4", 0, True),
    "int8": ("int8", 0, True),
    "fp8": ("fp8", 0, True),
    "fp8-block": ("fp8_block", 128, True),
}
