"""``python -m tests.parallel.live_weights tensor|pipeline``: two devices, new weights under running requests, sleep."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np

from lmjax import LLM, SamplingParams
from tests.fixtures import make_model, model_dir

SMALL = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 60}
PARAMS = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
PROMPTS = [f"{i} bottles of beer on the wall" for i in range(6)]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def same(tree: Any, other: Any) -> bool:
    """Whether they are the very arrays."""
    return all(a is b for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def main(shape: str) -> None:
    other = str(make_model(tempfile.mkdtemp() + "/m", seed=1))
    sizes = {f"{shape}_parallel_size": 2}
    with LLM(other, **SMALL) as fresh:
        expected, plain = tokens(fresh), fresh.params
    with LLM(str(model_dir("RAND")), **SMALL, **sizes) as llm:
        old, own = tokens(llm), llm.params
        llm.set_params(plain)  # that of one device
        assert tokens(llm) == expected != old
        llm.set_params(own)
        assert same(llm.params, own) and tokens(llm) == old
        found: list = []
        thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, PARAMS, use_tqdm=False)))
        before = llm.stats().generation_tokens
        thread.start()
        while llm.stats().generation_tokens < before + 60:
            time.sleep(0.001)
        llm.load_weights(other)
        thread.join()
        for output, were in zip(found, old, strict=True):
            count = output.outputs[0].weight_versions.count(2)
            assert output.outputs[0].token_ids[:count] == were[:count] and len(output.outputs[0].token_ids) == 50
        assert any(set(output.outputs[0].weight_versions) == {2, 3} for output in found)
        assert tokens(llm) == expected
        new = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding), llm.params)
        llm.set_params(new, kv_cache="recompute")
        assert same(llm.params, new) and tokens(llm) == expected
        llm.load_weights(other)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == expected
        assert llm.stats().compiles == 0 and llm.weight_version == 5


if __name__ == "__main__":
    main(sys.argv[1])
