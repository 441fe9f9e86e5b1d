"""The peer: transformers' paged continuous batching on the same shape. A process of its own, without jax.

python -m benchmarks.gpu_parts.peer small|full  -> one JSON object on the last line
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from benchmarks.gpu_parts.llama import FULL_STEP, LLAMA_8B, SMALL, SMALL_STEP


def measure(small: bool) -> dict[str, Any]:
    """The time of a decode step, from runs that differ in their number of steps alone."""
    import torch
    import transformers

    device = "cpu" if small else "cuda"
    if not small and not torch.cuda.is_available():
        return {"skipped": f"torch {torch.__version__} sees no CUDA device"}
    batch, context = SMALL_STEP if small else FULL_STEP
    few, many = (2, 4) if small else (8, 40)
    config = transformers.LlamaConfig(**(SMALL if small else LLAMA_8B))
    torch.manual_seed(0)
    if small:
        torch.set_num_threads(1)  # tiny products: more would wait for each other
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="paged|sdpa"
        ).eval()
    prompts = torch.randint(1, config.vocab_size, (batch, context)).tolist()

    # else it takes most of the machine's memory at every call; a card's is there to be taken
    limits: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 256} if small else {}
    batching = transformers.generation.ContinuousBatchingConfig(**limits)

    def seconds(new_tokens: int) -> float:
        how = transformers.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        begin = time.perf_counter()
        results = model.generate_batch(prompts, how, continuous_batching_config=batching, progress_bar=False)
        taken = time.perf_counter() - begin
        lengths = {len(result.generated_tokens) for result in results.values()}
        if lengths != {new_tokens} or len(results) != batch:
            raise RuntimeError(f"{len(results)} replies of {lengths} tokens instead of {batch} of {new_tokens}")
        return taken

    seconds(few)  # warm
    rounds = 1 if small else 2
    step = (min(seconds(many) for _ in range(rounds)) - min(seconds(few) for _ in range(rounds))) / (many - few)
    row = {"peer": f"transformers {transformers.__version__}, paged|sdpa", "torch": torch.__version__}
    return {"row": row | {"batch": batch, "context": context, "step_us": step * 1e6}}


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print
    try:
        result = measure(sys.argv[1] == "small")
    except ImportError as error:
        result = {"skipped": f"torch and transformers are not both here ({error})"}
    print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main()
