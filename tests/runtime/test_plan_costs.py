"""Arithmetic of plans against numbers from elsewhere: published parameter counts, formulas written down by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.parallel.split import Degree, share, spread
from lmjax.runtime import cards
from lmjax.runtime.hlo import Collective
from lmjax.runtime.plan_costs import kv_bytes_read, roofline, weights_of

CONFIGS = Path(__file__).parents[1] / "configs"
# numbers of parameters as the models' pages state them (safetensors' own metadata)
PUBLISHED = {"llama-3.1-8b": 8_030_261_248, "llama-3.3-70b": 70_553_706_496, "mixtral-8x7b": 46_702_792_704}


def config(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def weights(name, devices=1, expert_parallel=False, dtype="bfloat16"):
    degree = Degree(devices, 1, expert_parallel)
    return weights_of(spread(spec_from_hf(config(name), 4096), degree), dtype, degree)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name):
    assert weights(name).total == PUBLISHED[name]
    assert weights(name, dtype="float32").bytes == 4 * PUBLISHED[name]


@pytest.mark.parametrize("devices", [2, 8, 16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_share_by_hand(name, devices):
    """Matrices divide; norms and the router are whole; with more devices than KV heads those are repeated."""
    c = config(name)
    d, f, v, layers = (c[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"))
    heads, kv_heads = c["num_attention_heads"], max(c["num_key_value_heads"], devices)
    dim, experts = d // heads, c.get("num_local_experts")
    attention = d * dim * (2 * heads + 2 * kv_heads) // devices
    mlp = 3 * d * f * (experts or 1) // devices + (d * experts if experts else 0)
    rows = -(-v // (128 * devices)) * 128  # whole chunks of the sampler
    wanted = layers * (attention + mlp + 2 * d) + d + 2 * rows * d
    assert weights(name, devices).total == wanted
    if experts and devices <= experts:
        assert weights(name, devices, True).total == wanted


def test_operations_by_hand():
    """Two a parameter and token, but for the embedding; the head only for rows that sample."""
    found, c = weights("llama-3.1-8b"), config("llama-3.1-8b")
    head = c["vocab_size"] * c["hidden_size"]
    assert found.flops(10, 3) == 2 * (10 * (found.total - 2 * head) + 3 * head)
    mixtral, m = weights("mixtral-8x7b"), config("mixtral-8x7b")
    experts = 3 * m["hidden_size"] * m["intermediate_size"] * 8 * 32
    rest = mixtral.total - experts - 2 * m["vocab_size"] * m["hidden_size"]
    assert mixtral.flops(7, 0) == pytest.approx(2 * 7 * (rest + experts / 4))


def test_experts_that_nobody_picks_are_not_read():
    found = weights("mixtral-8x7b")
    everything = found.bytes - found.hidden * 32000 * 2
    assert found.bytes_read(1) == pytest.approx(everything - 0.75 * sum(size for _, size, _ in found.experts), rel=1e-3)
    assert found.bytes_read(256) == pytest.approx(everything, rel=1e-3)


def test_a_decode_step_is_its_bytes_over_the_bandwidth():
    card, found = cards.card("h200"), weights("llama-3.1-8b")
    spec = spec_from_hf(config("llama-3.1-8b"), 4096)
    kv = decoder.kv_specs(spec, "bfloat16")
    assert kv_bytes_read(kv, 1000) == 1000 * 32 * 2 * 8 * 128 * 2
    step = roofline(card, found, spec, kv, tokens=16, rows=16, context=1000, collectives=(), devices=1)
    read = found.bytes - 2 * 128256 * 4096 + 2 * 16 * 4096 + 16 * kv_bytes_read(kv, 1000)
    assert step.seconds == pytest.approx(read / 4.8e12) and step.bound == "memory"


def test_prefill_is_bound_by_compute_and_collectives_by_links():
    card, devices = cards.card("l4"), 4
    whole = spread(spec_from_hf(config("llama-3.1-8b"), 4096), Degree(devices))
    spec = share(whole, Degree(devices))
    found, kv = weights("llama-3.1-8b", devices), decoder.kv_specs(spec, "bfloat16")
    size = 2048 * 4096 * 2
    sent = (Collective("all-reduce", size),) * 65
    step = roofline(card, found, spec, kv, tokens=2048, rows=1, context=1024, collectives=sent, devices=devices)
    attention = 4 * 2048 * 1024 * 32 * 128 * 32 / devices
    assert step.compute_seconds == pytest.approx((found.flops(2048, 1) + attention) / 121e12)
    assert step.link_seconds == pytest.approx(65 * size * 2 * 3 / 4 / 32e9)
    assert step.bound == "compute" and step.seconds == pytest.approx(step.compute_seconds + step.link_seconds)
