"""Compiles the decode and prefill programs of whole models for 8 x H200 without a card and prints docs/gpu.md's table.

    LMJAX_CUDA_PLUGIN=.venv/3.11-cuda JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu \
        PYTHONPATH=.venv/3.11-cuda python -m scripts.gpu_programs [--layers 4]

Takes minutes. Tests hold the same at 2 and 4 layers (tests/runtime/test_gpu_programs.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.gpu_programs import Case, read

# model, tensor-parallel degree, pipeline stages
MODELS = (
    *(("llama-3.1-8b", tp, 1) for tp in (1, 2, 8)),
    ("llama-3.3-70b", 8, 1),
    ("llama-3.3-70b", 4, 2),
    ("mixtral-8x7b", 8, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=0, help="of each model (default: all)")
    layers = parser.parse_args().layers
    print("| program | kernels/layer | all-reduces | command buffers | args / pool / temp MiB | seconds |")
    print("|---|---|---|---|---|---|", flush=True)
    for model, tp, pp in MODELS:
        for tokens in (64, 2048, 8192):
            case, began = Case(model, tp, tokens // pp, layers=layers, pp=pp), time.monotonic()
            found = read(case)
            sizes = " / ".join(
                f"{n / 2**20:.1f}" for n in (found.argument_bytes, found.pool_bytes, found.temporary_bytes)
            )
            assert found.alias_bytes >= found.pool_bytes and not found.pool_makers, case
            how = f"{'EP' if case.expert_parallel else 'TP'} {tp}" + (f" PP {pp}" if pp > 1 else "")
            row = f"| {model} {how}, T={case.tokens} | {found.kernels_of_a_layer} | "
            row += f"{found.num_all_reduces} | {found.num_command_buffers} | {sizes} | {time.monotonic() - began:.0f} |"
            print(row, flush=True)
            read.cache_clear()


if __name__ == "__main__":
    main()
