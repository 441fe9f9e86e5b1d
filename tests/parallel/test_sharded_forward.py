"""Tensor and expert parallelism give what one device gives, and models that don't divide are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lmjax.parallel import split
from tests import tiny_families
from tests.parallel import sharded_forward

CASES = ["llama:8:tp", "smol:3:tp", "mixtral:4:ep", "qwen2_moe:4:tp"]
MORE = ["llama:2:tp", "mixtral:8:tp", "qwen2_moe:2:ep"]
# what sharding could break: QK-norm over all heads, KV heads repeated, ALiBi, sinks, experts with biases, latent KV
FAMILIES = ["gemma3:4:tp", "olmo2:4:tp", "bloom:2:tp", "gpt_oss:2:tp", "deepseek_v3:2:tp"]
OTHERS = [
    "gpt_oss:2:ep",
    "deepseek_v3:2:ep",
    *(f"{name}:2:tp" for name in tiny_families.FAMILIES if f"{name}:2:tp" not in FAMILIES),
]


@pytest.mark.parametrize(
    "cases",
    [
        CASES,
        FAMILIES,
        pytest.param(MORE, marks=pytest.mark.slow),
        pytest.param(OTHERS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
    ids=["some", "families", "more", "other families"],
)
def test_equals_one_device(cases):
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.sharded_forward", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {case: float(error) for case, error in (line.split() for line in done.stdout.splitlines())}
    assert set(errors) == set(cases)
    assert all(error < 1e-5 for error in errors.values()), errors
    assert any(error > 0 for error in errors.values()), "sums in another order differ somewhere"


@pytest.mark.parametrize(
    ("model", "tp", "expert_parallel", "named"),
    [
        ("llama", 3, False, "8 query heads; degrees that divide this model: 1, 2, 4, 8"),
        ("smol", 2, False, "9 query heads; degrees that divide this model: 1, 3"),
        ("mixtral", 8, True, "4 experts; degrees that divide this model: 1, 2, 4"),
        ("stablelm_parallel", 4, False, "2 KV heads, which have norms of their own and are not repeated; .*: 1, 2$"),
    ],
)
def test_what_does_not_divide_is_refused(model, tp, expert_parallel, named):
    spec = sharded_forward.spec_of(model)
    with pytest.raises(split.SplitError, match=named):
        split.spread(spec, split.Degree(tp, 1, expert_parallel))
