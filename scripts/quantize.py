"""Writes a quantised copy of a model directory: python scripts/quantize.py MODEL OUT --quantization int4

MODEL: a directory with config.json and .safetensors files of floats. OUT: a new directory in the layout of
compressed-tensors, which lmjax, transformers (with that package) and vLLM load. int8 and fp8: a scale an output
feature; int4: symmetric, groups of 32 input features. Matrices of the layers are quantised, embedding and head are not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lmjax.config import QUANTIZATIONS
from lmjax.weights.errors import WeightError
from lmjax.weights.quant_write import write_quantized


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n\n", 1)[1])
    parser.add_argument("model", type=Path, help="the directory to read")
    parser.add_argument("out", type=Path, help="the directory to write: new, or empty")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, required=True)
    args = parser.parse_args(argv)
    try:
        write_quantized(args.model, args.out, args.quantization, lambda line: print(line, file=sys.stderr))
    except (WeightError, ValueError) as error:
        print(f"quantize.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
