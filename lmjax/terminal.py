"""``lmjax generate``: one prompt, a conversation in the terminal, or a file of prompts."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lmjax.config import ConfigError, EngineConfig
from lmjax.flags import SAMPLING
from lmjax.types import ParameterError, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from lmjax.engine.llm import LLM

_SAMPLING_NAMES = {option.name for option in SAMPLING} | {"seed"}


@dataclasses.dataclass(frozen=True)
class Job:
    """What ``lmjax generate`` was asked to do. ``sampling``: the SamplingParams fields that were given. ``lora``: an
    adapter of ``--lora-modules``."""

    prompt: str | None
    file: Path | None
    output: Path | None
    raw: bool
    system: str | None
    sampling: dict[str, Any]
    lora: str | None = None


def run(job: Job, config: EngineConfig) -> int:
    """Raises ``ValueError`` (one line) when settings, model or input are at fault."""
    SamplingParams(**job.sampling)  # before the model is loaded
    if job.lora is not None and job.lora not in config.lora_modules:
        raise ConfigError(f"--lora: {_no_adapter(job.lora, config)}")
    lines = _read_lines(job.file, config) if job.file else []
    target = _open_output(job.output) if job.output else None
    if job.prompt is None and job.file is None and not sys.stdin.isatty():
        job = dataclasses.replace(job, prompt=sys.stdin.read())
    from lmjax.engine.llm import LLM

    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    with LLM(**settings, progress=_say) as llm:
        if sys.stderr.isatty():
            _say("")
        if target is not None:
            with target:
                _batch(llm, job, lines, target)
        elif job.prompt is not None:
            _answer(llm, job, _first_messages(job, job.prompt))
        else:
            _converse(llm, job)
    return 0


def _no_adapter(name: Any, config: EngineConfig) -> str:
    return f"got {name!r}, must be an adapter of --lora-modules ({', '.join(config.lora_modules) or 'there is none'})"


def _say(line: str) -> None:
    """Progress of the start: in a terminal on one line."""
    begin, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(begin + line, end=end, file=sys.stderr, flush=True)


# --- terminal -----------------------------------------------------------------------------------------------------


def _first_messages(job: Job, prompt: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": job.system}] if job.system else []
    return [*system, {"role": "user", "content": prompt}]


def _converse(llm: LLM, job: Job) -> None:
    """Until end of file. Ctrl-C ends an answer; what was said so far stays in the conversation."""
    print("End with Ctrl-D; Ctrl-C stops an answer.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if not prompt.strip():
            continue
        if not messages or job.raw:
            messages = _first_messages(job, prompt)
        else:
            messages.append({"role": "user", "content": prompt})
        try:
            answer = _answer(llm, job, messages)
        except ParameterError as error:
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, job: Job, messages: list[dict[str, str]]) -> str:
    """Prints the answer as it comes. Ctrl-C ends it in a conversation, and the program otherwise."""
    params = _params(llm, job, chat=_chats(llm, job))
    if _chats(llm, job):
        prompt: Any = llm.encode_chat(messages)
    else:
        prompt = messages[-1]["content"]
    parts: list[str] = []
    updates = llm.stream(prompt, params, lora=job.lora)
    try:
        for update in updates:
            for delta in update.deltas:
                parts.append(delta.text)
                sys.stdout.write(delta.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if job.prompt is not None:
            raise
    print()
    return "".join(parts)


def _chats(llm: LLM, job: Job) -> bool:
    return not job.raw and llm.tokenizer.chat_template is not None


def _params(llm: LLM, job: Job, chat: bool, changes: dict[str, Any] | None = None) -> SamplingParams:
    """What was given over the model's own defaults."""
    defaults = {"max_tokens": None if chat else 16} | llm.info.default_sampling
    return SamplingParams(**(defaults | job.sampling | (changes or {})))


# --- batches ------------------------------------------------------------------------------------------------------


def _read_lines(path: Path, config: EngineConfig) -> list[dict[str, Any]]:
    """Each line: a JSON string (a prompt), or an object with ``prompt`` or ``messages``, sampling parameters and
    ``lora``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--file: {path}: {getattr(error, 'strerror', None) or error}") from None
    return [_check_line(f"{path}:{number}", line, config) for number, line in _numbered(text) if line.strip()]


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(text.split("\n"), 1)


def _check_line(where: str, line: str, config: EngineConfig) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--file: {where}: not JSON: {error}") from None
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f"--file: {where}: must be a text, or an object with either 'prompt' or 'messages'")
    if "prompt" in entry and not isinstance(entry["prompt"], str):
        raise ConfigError(f"--file: {where}: prompt: must be a text")
    if unknown := set(entry) - _SAMPLING_NAMES - {"prompt", "messages", "lora"}:
        known = ", ".join(sorted(_SAMPLING_NAMES | {"lora"}))
        raise ConfigError(f"--file: {where}: {min(unknown)}: unknown; known are {known}")
    if (name := entry.get("lora")) is not None and (not isinstance(name, str) or name not in config.lora_modules):
        raise ConfigError(f"--file: {where}: lora: {_no_adapter(name, config)}")
    try:
        SamplingParams(**_sampling_of(entry))
    except ParameterError as error:
        raise ConfigError(f"--file: {where}: {error}") from None
    return entry


def _sampling_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name in _SAMPLING_NAMES}


def _open_output(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path}: {error.strerror}") from None


def _batch(llm: LLM, job: Job, lines: list[dict[str, Any]], target: IO[str]) -> None:
    """Answers in the order of the lines. A prompt by itself is a user's message where the model chats; a line's own
    ``lora``, null too (the model itself), goes before ``--lora``."""
    prompts, params, loras = [], [], []
    for entry in lines:
        chat = "messages" in entry or _chats(llm, job)
        messages = entry.get("messages") or _first_messages(job, entry.get("prompt", ""))
        prompts.append(llm.encode_chat(messages) if chat else llm.tokenizer.encode(entry["prompt"]))
        params.append(_params(llm, job, chat, _sampling_of(entry)))
        loras.append(entry.get("lora", job.lora))
    for entry, output in zip(lines, llm.generate(prompts, params, lora=loras) if prompts else [], strict=True):
        target.write(json.dumps(_result(entry, output), ensure_ascii=False) + "\n")


def _result(entry: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        **{name: entry[name] for name in ("prompt", "messages", "lora") if name in entry},
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_tokens": len(answer.token_ids),
    }
