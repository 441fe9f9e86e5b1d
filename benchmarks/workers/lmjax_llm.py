"""lmjax through its Python API."""

from channel import serve


def load(settings: dict):
    from lmjax import LLM, SamplingParams

    llm = LLM(settings["model"], dtype="float32", max_model_len=2048, max_num_seqs=settings["max_num_seqs"])

    def generate(prompts, max_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    return generate


if __name__ == "__main__":
    serve(load)
