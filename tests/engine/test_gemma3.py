"""Gemma 3 270M through the whole engine against transformers' greedy tokens, also past its window of 512.

Opt-in, as its weights have a licence of their own: ``LMJAX_GEMMA3=PATH`` names a Hugging Face directory of the base
model, or its .gguf file (the goldens are of the one in Q4_K_M, dequantised). By ``scripts/make_goldens.py gemma3``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent.parent / "goldens" / "gemma3_270m.json"
WHERE = os.environ.get("LMJAX_GEMMA3", "")
pytestmark = pytest.mark.skipif(not WHERE, reason="LMJAX_GEMMA3 does not name a directory of Gemma 3 270M")


def test_twenty_prompts_give_the_tokens_of_transformers():
    from lmjax import LLM, SamplingParams

    goldens = json.loads(GOLDENS.read_text())
    assert len(goldens) == 20 and sum(len(golden["prompt_ids"]) > 512 for golden in goldens) >= 5
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(WHERE, dtype="float32", max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=128) as llm:
        outputs = llm.generate([golden["prompt_ids"] for golden in goldens], params, use_tqdm=False)
    for golden, output in zip(goldens, outputs, strict=True):
        assert output.outputs[0].token_ids == golden["token_ids"], len(golden["prompt_ids"])
