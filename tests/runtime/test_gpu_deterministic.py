"""What ``--deterministic`` is on a card, as far as a compiler can tell: programs for any number of tokens take the
same products, of the same shapes, in kernels of the same names and tiles, and none of them was chosen by timing."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import jax
import pytest

from lmjax.nn.tiles import GPU_TILE
from lmjax.runtime import gpu_settings
from lmjax.runtime.buckets import ForwardKey
from lmjax.runtime.programs import forward_program
from tests import deviceless
from tests.gpu_programs import CONFIGS, Case, make_shapes

pytestmark = [
    deviceless.skip,
    pytest.mark.skipif(
        jax.__version_info__ >= (0, 12),
        reason="without timings XLA of jax 0.12 finds no way to compute a product for a card that is not there",
    ),
]


def products(text: str) -> Counter[str]:
    """Every matrix product of a compiled program: shapes, layouts, what is contracted."""
    found = re.findall(r"= (\S+) dot\((.*?)(?:, metadata=|$)", text, flags=re.MULTILINE)
    return Counter(re.sub(r"%[\w.\-]+", "%", " ".join(line)) for line in found)


def compiled(tokens: int, tile: int | None) -> deviceless.Compiled:
    case = Case("llama-3.1-8b", 1, tokens, layers=1)
    config = json.loads((CONFIGS / f"{case.model}.json").read_text()) | {"num_hidden_layers": 1}
    shapes = make_shapes(case, config)
    shapes = replace(shapes, env=replace(shapes.env, tile=tile))
    program = forward_program(shapes, ForwardKey(tokens, 256))
    assert program.options == (gpu_settings.DETERMINISTIC if tile else ())
    options = dict(program.options)
    return deviceless.compile(program.function, *program.arguments, donate=program.donate, options=options)


def test_programs_of_all_widths_take_the_same_products():
    narrow, wide = compiled(256, GPU_TILE), compiled(512, GPU_TILE)
    assert products(narrow.text) == products(wide.text) != Counter()
    assert narrow.memory.alias_size_in_bytes == wide.memory.alias_size_in_bytes
    kernels = [Counter(re.findall(r"custom-call\(.*?(\w+)/pallas_call", c.text)) for c in (narrow, wide)]
    assert kernels[0] == kernels[1] and "paged_decode" in kernels[0] and "paged_prefill" not in kernels[0]


@pytest.mark.slow
def test_without_tiles_they_do_not():
    assert products(compiled(256, None).text) != products(compiled(512, None).text)
