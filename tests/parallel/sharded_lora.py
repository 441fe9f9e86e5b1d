"""Runs on 8 CPU devices, in a process of its own: adapters of an engine on a mesh, against merged weights in peft."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from lmjax import LLM, SamplingParams
from tests import tiny, tiny_loras

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def answers(degree: int) -> None:
    """Two slots, three adapters and the base model: slots change between steps, on all devices."""
    goldens = np.load(Path(tiny.__file__).parent / "goldens" / "loras.npz")
    folder = Path(tempfile.mkdtemp())
    names = ["many0", "many1", "many2"]
    llm = LLM(
        params=tiny.tensors(tiny_loras.MODEL),
        config=tiny.CASES[tiny_loras.MODEL].config,
        enable_lora=True,
        max_loras=2,
        lora_modules={name: str(tiny_loras.write(name, folder / name)) for name in names},
        tensor_parallel_size=degree,
        max_num_seqs=4,
        max_model_len=48,
        max_num_batched_tokens=8,
        num_gpu_blocks_override=32,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tiny_loras.GREEDY, ignore_eos=True)
    asked = [("many0", 0), (None, 0), ("many1", 1), ("many2", 1), ("many0", 1)]
    prompts = [tiny_loras.prompts(name or "base")[i] for name, i in asked]
    found = llm.generate(prompts, params, use_tqdm=False, lora=[name for name, _ in asked])
    for (name, i), out in zip(asked, found, strict=True):
        assert out.outputs[0].token_ids == goldens[f"{name or 'base'}/{i}"].tolist(), (name, i)
    assert llm.stats().compiles == 0
    llm.close()
    print(f"{degree} equal", flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        answers(int(argument))
