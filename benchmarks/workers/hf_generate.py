"""transformers: static batch ``generate`` (left padding), or continuous batching (setting ``continuous``)."""

import os

from channel import serve


def load(settings: dict):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    paged = settings.get("continuous", False)
    extra = {"attn_implementation": "paged|sdpa"} if paged else {}
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, **extra).eval()
    pad = model.config.pad_token_id or 0

    def config(max_tokens):
        # no end of sequence: every reply has exactly max_tokens tokens
        return GenerationConfig(
            max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=pad, eos_token_id=None
        )

    def static(prompts, max_tokens):
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config(max_tokens))
        return out[:, longest:].tolist()

    def continuous(prompts, max_tokens):
        settings_ = config(max_tokens)
        settings_.eos_token_id = -1
        results = model.generate_batch(inputs=prompts, generation_config=settings_, progress_bar=False)
        by_id = sorted(results.values(), key=lambda r: int(str(r.request_id).rsplit("_", 1)[-1]))
        return [list(r.generated_tokens) for r in by_id]

    return continuous if paged else static


if __name__ == "__main__":
    serve(load)
