"""EleutherAI's lm-evaluation-harness on lmjax: inside this process, or over HTTP against a running server.

    python -m examples.evaluate --model smollm2 --include-path my_tasks --tasks capitals
    python -m examples.evaluate --base-url http://localhost:8000 --include-path my_tasks --tasks capitals

Needs the extra ``eval`` (``pip install 'lmjax[eval]'``; no torch). Over HTTP the harness's own model
``local-completions`` does the work, which takes the tokenizer from a directory (--tokenizer).
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lmjax import LLM, SamplingParams
from lmjax.flags import Parser, add_options, engine_options, settings_of
from lmjax.text.chat import render_chat

try:
    from lm_eval.api.model import TemplateLM
except ImportError:  # what scores token ids works without the harness
    TemplateLM = object

Pair = tuple[list[int], list[int]]  # ids of a context and of its continuation


def score(llm: LLM, sequences: Sequence[list[int]]) -> Iterator[tuple[int, list[float], list[bool]]]:
    """As they are finished: (index of the sequence, log-probability of each token after the first, whether that is
    the most likely token)."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for index, output in llm.as_completed(sequences, params):
        entries = zip(sequences[index][1:], (output.prompt_logprobs or [])[1:], strict=True)
        found = [entry[token] for token, entry in entries if entry is not None]
        yield index, [entry.logprob for entry in found], [entry.rank == 1 for entry in found]


class LmjaxLM(TemplateLM):
    """The harness's view of an ``LLM``. Like ``transformers``' there, but all requests go to the engine at once.

    ``max_length``: tokens of context that a score may have; what is longer loses its beginning.
    """

    def __init__(self, llm: LLM, max_gen_toks: int = 256, progress: bool = True):
        super().__init__()
        self.llm, self.tokenizer, self.max_gen_toks, self._progress = llm, llm.tokenizer, max_gen_toks, progress
        self.max_length = llm.info.max_model_len - 2  # the token that is scored, and one that the engine generates

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a text that brings its BOS gets no second one
            add_special_tokens = not string.startswith(self.tokenizer.token_text(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    # --- what the harness asks for --------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[Any]:
        """(log-likelihood of the continuation, whether greedy decoding would give it) of each (key, context,
        continuation)."""
        sequences = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        results: list[Any] = [None] * len(requests)
        for index, logprobs, greedy in self._bar(score(self.llm, sequences), len(requests)):
            key, _, continuation = requests[index]
            begin = max(0, len(logprobs) - len(continuation))
            results[index] = sum(logprobs[begin:]), all(greedy[begin:])
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[index])
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        from lm_eval.models.utils import normalize_gen_kwargs

        prompts, params = [], []
        for context, asked in (request.args for request in requests):
            given = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
            sampled, most, stop = given.pop("do_sample"), given.pop("max_gen_toks"), given.pop("until")
            if not sampled:
                given = {"temperature": 0.0}  # what else there is would only shape samples
            given |= {"stop": [text for text in stop if text], "stop_token_ids": [self.eot_token_id]}
            prompts.append(self.tok_encode(context)[most - self.max_length :])
            params.append(SamplingParams(max_tokens=most, **given))
        texts = [""] * len(requests)
        for index, output in self._bar(self.llm.as_completed(prompts, params), len(requests)):
            texts[index] = output.outputs[0].text
            self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
        return texts

    # --- chat -----------------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return self.llm.info.model.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return str(self.tokenizer.chat_template or "")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _bar(self, items: Iterator[Any], total: int) -> Iterator[Any]:
        return iter(tqdm(items, total=total, disable=not self._progress, unit="req"))


def over_http(base_url: str, tokenizer: str | None = None, num_concurrent: int = 16) -> dict[str, Any]:
    """``simple_evaluate``'s arguments for the harness's own client and the first model of a server."""
    from lmjax.weights.source import resolve_model

    base_url = base_url.rstrip("/").removesuffix("/v1")
    with urllib.request.urlopen(f"{base_url}/v1/models") as reply:
        model = json.load(reply)["data"][0]
    return {
        "model": "local-completions",
        "model_args": {
            "model": model["id"],
            "base_url": f"{base_url}/v1/completions",
            "tokenizer": tokenizer or str(resolve_model(model["root"], config_only=True).path),
            "tokenizer_backend": "huggingface",
            "max_length": model["max_model_len"],
            "num_concurrent": num_concurrent,
            "add_bos_token": True,  # special tokens as the tokenizer puts them, as the harness does for transformers
        },
    }


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    parser.add_argument("--include-path", help="folder with tasks (YAML) of one's own")
    parser.add_argument("--base-url", help="a running server, instead of a model in this process")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--apply-chat-template", action="store_true")
    parser.add_argument("--output", type=Path, help="where the results go as JSON")
    add_options(parser, "engine", engine_options())
    args = parser.parse_args(argv)
    engine = settings_of(args, engine_options())
    if args.base_url and (given := set(engine) - {"tokenizer"}):
        parser.error(f"--{min(given).replace('_', '-')}: is the server's to know; with --base-url only --tokenizer")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError:
        parser.error("the harness is missing: pip install 'lmjax[eval]'")
    where = over_http(args.base_url, engine.get("tokenizer")) if args.base_url else {"model": LmjaxLM(LLM(**engine))}
    results = simple_evaluate(
        **where,
        tasks=args.tasks.split(","),
        task_manager=TaskManager(include_path=args.include_path),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
        log_samples=False,
    )
    text = json.dumps(results["results"], indent=1, default=str)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
