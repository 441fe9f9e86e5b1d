"""Answers to a file of prompts, several a prompt, by a run that may be stopped at any moment and started again.

    python -m examples.synthetic prompts.jsonl answers.jsonl --model smollm2 --samples 4 --temperature 0.8

A line of the prompts is an object with ``prompt`` (a text to go on with) or ``messages`` (for the chat template). It
may have an ``id`` (else its line number is one) and sampling parameters of its own. Each answer is written as soon as
it is finished, so in no order. Its seed is made from --seed, id and sample alone, so it does not matter in which run
it was made. Bad lines are reported and left out; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from lmjax import LLM, SamplingParams
from lmjax.engine.validate import check_request
from lmjax.flags import SAMPLING, Option, Parser, add_options, engine_options, settings_of

WINDOW = 4096  # answers that are queued in the engine at once
OWN = (Option("samples", int, "answers to each prompt", 1), Option("seed", int, "what all seeds are made from", 0))
SAMPLED = (Option("max_tokens", int, "most tokens of an answer", 256), *(o for o in SAMPLING if o.name != "max_tokens"))
ENGINE = tuple(option for option in engine_options() if option.name != "seed")
# what makes it another model, so that answers of the two do not belong into one file
MODEL = ("model", "tokenizer", "revision", "load_format", "dtype", "kv_cache_dtype", "hf_overrides", "chat_template")
Key = tuple[Any, int]  # id and sample
Report = Callable[[int, object], None]  # takes a line of the prompts and what is wrong with it


@dataclass(frozen=True)
class Job:
    """One answer to be. ``digest`` changes with everything that the answer depends on."""

    line: int
    key: Key
    source: dict[str, Any]  # prompt or messages
    params: SamplingParams
    digest: str


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def jobs_of(line: int, text: bytes, sampling: dict[str, Any], model: Any, seed: int = 0, samples: int = 1) -> list[Job]:
    """The answers that one line asks for; raises ``ValueError``."""
    entry = json.loads(text)
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError("must be an object with either 'prompt' or 'messages'")
    json.dumps(entry, ensure_ascii=False).encode()  # half of a surrogate pair could not be written again
    name = entry.pop("id", line)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id: got {name!r}, must be a text or an integer")
    source = {k: entry.pop(k) for k in ("prompt", "messages") if k in entry}
    if not isinstance(source.get("prompt", ""), str):
        raise ValueError(f"prompt: got {source['prompt']!r}, must be a text")
    known = {option.name for option in SAMPLED}
    if unknown := set(entry) - known:
        raise ValueError(f"{min(unknown)}: unknown; known are id, messages, prompt, {', '.join(sorted(known))}")
    seeds = [int(digest(seed, name, sample), 16) for sample in range(samples)]
    params = [SamplingParams(**sampling | entry, seed=seed) for seed in seeds]
    return [Job(line, (name, i), source, p, digest(model, source, p.to_dict())) for i, p in enumerate(params)]


def read_jobs(path: Path, report: Report, *settings: Any, **more: Any) -> dict[Key, Job]:
    jobs: dict[Key, Job] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                found = jobs_of(number, text, *settings, **more) if text.strip() else []
                if found and (first := jobs.get(found[0].key)):
                    raise ValueError(f"id: {first.key[0]!r} is that of line {first.line}, too")
                jobs |= {job.key: job for job in found}
            except (ValueError, RecursionError) as error:
                report(number, error)
    return jobs


def lock(path: Path) -> IO[bytes]:
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it, however the process ends
    except OSError:
        raise ValueError(f"{path}: another run is writing to it") from None
    return file


def read_answers(file: IO[bytes], jobs: dict[Key, Job]) -> set[Key]:
    """What is there already; a torn last line is cut off. Raises ``ValueError`` if the file is of other jobs."""
    file.seek(0)
    done, end = set(), 0
    for number, text in enumerate(file, 1):
        if not text.endswith(b"\n"):
            break
        try:
            entry = json.loads(text)
            key, found = (entry["id"], entry["sample"]), entry["digest"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{file.name}:{number}: is no answer of this program") from None
        if key not in jobs or jobs[key].digest != found:
            raise ValueError(f"{file.name}:{number}: is of another prompt, model or setting; give another file")
        done.add(key)
        end += len(text)
    file.truncate(end)
    return done


def generate(llm: LLM, jobs: list[Job], report: Report) -> Iterator[dict[str, Any]]:
    """The answers as they are finished. A job that this model can't run is reported."""
    ready = []
    for job in jobs:
        try:
            text = job.source.get("prompt")
            ids = llm.encode_chat(job.source["messages"]) if text is None else llm.tokenizer.encode(text)
            check_request(ids, job.params, llm.info, llm.tokenizer)
            ready.append((job, ids))
        except ValueError as error:
            report(job.line, error)
    for index, output in llm.as_completed([ids for _, ids in ready], [job.params for job, _ in ready]):
        job, answer = ready[index][0], output.outputs[0]
        record = {"id": job.key[0], "sample": job.key[1], **job.source, "text": answer.text}
        record |= {"finish_reason": answer.finish_reason, "num_tokens": len(answer.token_ids)}
        yield record | {"seed": job.params.seed, "digest": job.digest}


def work(file: IO[bytes], jobs: dict[Key, Job], done: set[Key], report: Report, engine: dict[str, Any]) -> None:
    todo = [job for key, job in jobs.items() if key not in done]
    if not todo:
        return
    with LLM(**engine) as llm, tqdm(total=len(jobs), initial=len(done), unit="answer") as bar:
        for begin in range(0, len(todo), WINDOW):
            for record in generate(llm, todo[begin : begin + WINDOW], report):
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
                bar.update()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="synthetic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    for title, options in (("answers", OWN), ("sampling", SAMPLED), ("engine", ENGINE)):
        add_options(parser, title, options)
    args = parser.parse_args(argv)
    bad = set()

    def report(line: int, error: object) -> None:
        if line not in bad:
            tqdm.write(f"{args.prompts}:{line}: {error}", file=sys.stderr)
        bad.add(line)

    own, sampling, engine = (settings_of(args, options) for options in (OWN, SAMPLED, ENGINE))
    sampling = {"max_tokens": 256} | sampling
    with ExitStack() as stack:
        try:
            SamplingParams(**sampling)
            if own.get("samples", 1) < 1:
                raise ValueError(f"--samples: got {own['samples']}, must be at least 1")
            jobs = read_jobs(args.prompts, report, sampling, {name: engine.get(name) for name in MODEL}, **own)
            file = stack.enter_context(lock(args.answers))
            done = read_answers(file, jobs)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        work(file, jobs, done, report, engine)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
