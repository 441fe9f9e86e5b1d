"""The import rules and the size cap of docs/structure.md."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
LONGER_ON_PURPOSE: dict[str, str] = {}  # path -> reason

# layer -> (own packages it may import, third party it may import). The first matching prefix counts.
NUMERIC = {"jax", "flax", "numpy", "ml_dtypes"}
LAYERS: list[tuple[str, set[str], set[str]]] = [
    ("pallas_kernels", {"pallas_kernels"}, {"jax", "numpy"}),
    ("lmjax/types.py", set(), set()),
    ("lmjax/config.py", {"lmjax.types"}, set()),
    ("lmjax/protocol.py", {"lmjax.types"}, set()),
    ("lmjax/cluster", {"lmjax.cluster", "lmjax.types", "lmjax.config"}, {"jax", "msgspec", "zmq"}),
    ("lmjax/core", {"lmjax.core", "lmjax.types", "lmjax.config"}, {"numpy"}),
    ("lmjax/nn", {"lmjax.nn", "lmjax.types", "pallas_kernels"}, NUMERIC),
    ("lmjax/models", {"lmjax.models", "lmjax.nn", "lmjax.types", "pallas_kernels"}, NUMERIC),
    ("lmjax/parallel", {"lmjax.parallel", "lmjax.models", "lmjax.nn", "lmjax.types", "pallas_kernels"}, NUMERIC),
    ("lmjax/sampling", {"lmjax.sampling", "lmjax.types", "lmjax.core.plan", "pallas_kernels"}, NUMERIC),
    (
        "lmjax/weights",
        {"lmjax.weights", "lmjax.models", "lmjax.nn", "lmjax.types", "lmjax.config"},
        NUMERIC | {"safetensors", "gguf", "huggingface_hub", "tqdm"},
    ),
    (
        "lmjax/runtime",
        {"lmjax.runtime", "lmjax.weights", "lmjax.models", "lmjax.nn", "lmjax.sampling", "lmjax.types", "lmjax.config"}
        | {"lmjax.core.plan", "lmjax.parallel", "lmjax.cluster", "pallas_kernels"},
        NUMERIC | {"tqdm", "msgspec"},
    ),
    (
        "lmjax/functional",
        {"lmjax.functional", "lmjax.runtime", "lmjax.models", "lmjax.nn", "lmjax.sampling", "lmjax.types"}
        | {"lmjax.core.plan", "lmjax.parallel", "pallas_kernels"},
        NUMERIC,
    ),
    ("lmjax/text", {"lmjax.text", "lmjax.types"}, {"transformers", "tokenizers", "jinja2", "numpy", "gguf"}),
    (
        "lmjax/engine",
        {"lmjax.engine", "lmjax.core", "lmjax.text", "lmjax.types", "lmjax.config", "lmjax.protocol"}
        | {"lmjax.runtime.executor", "lmjax.weights", "lmjax.cluster"},
        {"numpy", "msgspec", "zmq", "tqdm"},
    ),
    ("server", {"server", "lmjax.protocol", "lmjax.types", "lmjax.text"}, {"aiohttp", "msgspec", "prometheus_client"}),
]


def sources() -> list[Path]:
    return [p for top in ("lmjax", "server", "pallas_kernels", "examples") for p in sorted((ROOT / top).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            own = node.module.split(".")[0] in ("lmjax", "server", "pallas_kernels")
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if own else {node.module}
    return names


def violations(path: Path, names: set[str]) -> list[str]:
    relative = path.relative_to(ROOT).as_posix()
    rule = next((r for r in LAYERS if relative == r[0] or relative.startswith(r[0] + "/")), None)
    if rule is None:  # lmjax/__init__.py, lmjax/cli.py and the examples: they wire all
        return [n for n in names if n.split(".")[0] == "torch"]
    _, own, third = rule
    bad = []
    for name in names:
        top = name.split(".")[0]
        if top in ("lmjax", "server", "pallas_kernels"):
            if name != "lmjax.__version__" and not any(name == o or name.startswith(o + ".") for o in own):
                bad.append(name)
        elif top not in sys.stdlib_module_names and top not in third:
            bad.append(name)
    return bad


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_follow_the_layers(path):
    assert not violations(path, imported(path))


def test_the_rule_can_fail():
    assert violations(ROOT / "lmjax/core/x.py", {"jax.numpy"}) == ["jax.numpy"]
    assert violations(ROOT / "server/x.py", {"lmjax.core.plan.StepPlan"}) == ["lmjax.core.plan.StepPlan"]
    assert violations(ROOT / "pallas_kernels/x.py", {"lmjax.types.KVSpec"}) == ["lmjax.types.KVSpec"]


def test_files_stay_small():
    tests = sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in sources() + tests}
    assert {p: n for p, n in lengths.items() if n > MAX_LINES and p not in LONGER_ON_PURPOSE} == {}
