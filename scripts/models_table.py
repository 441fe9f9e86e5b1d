"""Writes the tables of docs/models.md from the registry of families and the cases of the tests.

python -m scripts.models_table            # writes them
python -m scripts.models_table --check    # exit code 1 where the document is not as written
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lmjax.models import encoder_spec
from lmjax.models.names import GGUF_FAMILIES
from lmjax.models.registry import FAMILIES
from lmjax.weights.checkpoint import FLOATS
from lmjax.weights.quant import LAYOUTS
from lmjax.weights.quant_gguf import PACKINGS
from tests import tiny, tiny_encoders
from tests.weights import quantised

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- written by scripts/models_table.py -->\n", "<!-- end -->\n"
PREFIXES = {"gptq": "gptq-", "awq": "awq-", "fp8": "fp8-", "compressed-tensors": "ct-", "bitsandbytes": "bnb-"}
DECODERS, ENCODERS = "tests/models/test_decoder.py", "tests/models/test_encoder.py"
QUANTISED = "tests/weights/test_quantised.py"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def stored_cases() -> set[str]:
    """Cases with logits of transformers in tests/goldens."""
    files = [np.load(ROOT / "tests" / "goldens" / f"{name}.npz") for name in ("tiny", "families", "encoders")]
    return {key.split("/")[0] for file in files for key in file.files}


def families() -> str:
    stored, rows = stored_cases(), []
    for name, module in sorted(FAMILIES.items()):
        cases = [case for case, its in tiny.CASES.items() if its.config["model_type"] == name and case in stored]
        about = (module.__doc__ or "").splitlines()[0].rstrip(".").replace("|", "\\|").replace("``", "`")
        gguf = "yes" if name in GGUF_FAMILIES else ""
        rows.append((f"`{name}`", f"`{module.ARCHITECTURE}`", about, gguf, ", ".join(cases)))
    head = ("`model_type`", "`architectures`", "what it is", "GGUF", f"compared with transformers in `{DECODERS}`")
    return table(head, rows)


def encoders() -> str:
    stored, rows = stored_cases(), []
    for name, (bare, scored) in encoder_spec.FAMILIES.items():
        cases = [case for case in tiny_encoders.CASES if tiny_encoders.CASES[case]["model_type"] == name]
        known = ", ".join(f"`{architecture}`" for architecture in (*bare, scored))
        rows.append((f"`{name}`", known, ", ".join(case for case in cases if case in stored)))
    return table(("`model_type`", "`architectures`", f"compared with transformers in `{ENCODERS}`"), rows)


def formats() -> str:
    rows = [
        (
            "safetensors",
            f"{', '.join(FLOATS)}; one file or shards",
            "`tests/weights/test_safetensors.py`, `test_loader.py`",
        ),
        (
            "GGUF",
            f"every type that the `gguf` package dequantises; {', '.join(PACKINGS)} can stay packed",
            "`tests/weights/test_gguf.py`, `test_gguf_config.py`, `test_gguf_gemma.py`, `test_quantised.py`",
        ),
    ]
    for method in LAYOUTS:
        names = [name for name in quantised.LAYOUTS if name.startswith(PREFIXES.get(method, "\n"))]
        tests = f"`{QUANTISED}`" if names else "`tests/weights/test_quantised_families.py`"
        rows.append((f"`{method}`", ", ".join(names), tests))
    return table(("format, `quant_method`", "cases", "test"), rows)


def section() -> str:
    parts = (
        families(),
        "Encoders ([embeddings](embeddings.md)):\n\n" + encoders(),
        "Formats of weights:\n\n" + formats(),
    )
    return BEGIN + "\n" + "\n".join(parts) + "\n" + END


def written(text: str) -> str:
    """The document with its tables as they should be."""
    before, _, rest = text.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        return int(written(text) != text)
    DOCUMENT.write_text(written(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
