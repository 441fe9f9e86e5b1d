"""``/v1/completions``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from msgspec import UNSET

from lmjax.protocol import EngineClient
from lmjax.types import Delta, RequestUpdate, TokenLogprobs
from server.body import json_response, read_body
from server.generation import Generation
from server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from server.openai.replies import Completion, CompletionChoice, CompletionLogprobs, Head
from server.prepare import Job, is_heavy, prepare_completion
from server.schema import CompletionRequest
from server.serve import collect, stream, total_usage
from server.sse import EventStream
from server.state import STATE, new_id


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    client = state.admit()
    body = await read_body(request)
    asked, jobs = await state.offload(is_heavy(body, state.settings), prepare_completion, body, client, state.settings)
    model = state.model_name(asked.model)
    head = Head(new_id("cmpl", asked.request_id), int(time.time()), model)
    answer = _Answer(client, asked, jobs)
    generation = Generation(
        client,
        state.metrics,
        jobs,
        lora=state.lora_of(model),
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        prompt_only=answer.prompt_only,
    )
    if asked.stream:
        events = EventStream(request, head, "text_completion", asked.include_usage)
        chunks = _Chunks(answer, events, generation if asked.continuous_usage else None)
        return await stream(request, state, generation, events, chunks.render, asked.include_usage)
    await collect(request, state, generation, answer.take)
    return json_response(
        Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=answer.choices(),
            usage=total_usage(generation),
        )
    )


@dataclass(slots=True)
class _Choice:
    """One choice on its way: ``whole`` is all of it so far (of a plain request)."""

    whole: Delta
    writer: CompletionLogprobsWriter | None
    echo: str | None  # the prompt's text, until it was sent
    logprobs: CompletionLogprobs | None = None
    first: bool = True


@dataclass
class _Answer:
    """What every prompt's choices look like. Choice ``j`` of prompt ``i`` has the index ``i * n + j``."""

    client: EngineClient
    asked: CompletionRequest
    jobs: list[Job]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n = self.jobs[0].params.n
        # max_tokens 0 with echo asks for the prompt only; the engine's one token is left out
        self.prompt_only = self.asked.echo and self.asked.max_tokens == 0 and self.asked.max_completion_tokens is None
        self.state = [self._choice(i, j) for i in range(len(self.jobs)) for j in range(self.n)]

    def _choice(self, prompt: int, index: int) -> _Choice:
        job, tokenizer = self.jobs[prompt], self.client.tokenizer
        writer = None
        if self.asked.logprobs is not None:
            writer = CompletionLogprobsWriter(tokenizer, self.asked.logprobs, job.params.skip_special_tokens)
        echo = None
        if self.asked.echo:
            echo = job.text if job.text is not None else tokenizer.decode(job.ids)
        return _Choice(Delta(prompt * self.n + index), writer, echo)

    def take(self, prompt: int, update: RequestUpdate) -> None:
        if update.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = update.prompt_logprobs
        for delta in update.deltas:
            self.state[prompt * self.n + delta.index].whole.merge(delta)

    def choices(self) -> list[CompletionChoice]:
        return [self.choice(i // self.n, state, state.whole) for i, state in enumerate(self.state)]

    def choice(self, prompt: int, state: _Choice, delta: Delta) -> CompletionChoice:
        """A delta as a choice; the first one of an echo starts with the prompt."""
        if self.prompt_only:
            delta = Delta(delta.index, logprobs=None, finish_reason="length" if delta.finish_reason else None)
        echo, state.echo = state.echo, None
        choice = CompletionChoice(
            index=state.whole.index,
            text=delta.text if echo is None else echo + delta.text,
            logprobs=self._logprobs(prompt, state, delta, echo),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self.asked.return_token_ids:
            choice.token_ids, choice.weight_versions = delta.token_ids, delta.weight_versions
            choice.prompt_token_ids = self.jobs[prompt].ids if state.first else UNSET
        if self.asked.prompt_logprobs is not None:
            entries = self.prompt_logprobs[prompt]
            choice.prompt_logprobs = prompt_logprobs(self.client.tokenizer, entries, self.asked.prompt_logprobs)
        state.first = False
        return choice

    def _logprobs(self, prompt: int, state: _Choice, delta: Delta, echo: str | None) -> CompletionLogprobs | None:
        writer = state.writer
        if writer is None:
            return None
        if echo is None:
            return writer.push(delta.logprobs or [])
        first = writer.prompt(self.jobs[prompt].ids, self.prompt_logprobs[prompt], echo)
        rest = writer.push(delta.logprobs or [])
        for name in msgspec.structs.fields(CompletionLogprobs):
            getattr(first, name.name).extend(getattr(rest, name.name))
        return first


class _Chunks:
    """Updates as chunks of a stream. ``usage_of``: the generation, if every chunk shows the usage so far."""

    def __init__(self, answer: _Answer, events: EventStream, usage_of: Generation | None):
        self._answer, self._events, self._usage_of = answer, events, usage_of

    def render(self, prompt: int, update: RequestUpdate) -> None:
        answer = self._answer
        if update.prompt_logprobs is not None:
            answer.prompt_logprobs[prompt] = update.prompt_logprobs
        for delta in update.deltas:
            state = answer.state[prompt * answer.n + delta.index]
            if _says_something(delta, answer.asked):
                usage = total_usage(self._usage_of) if self._usage_of else None
                self._events.add(answer.choice(prompt, state, delta), usage)


def _says_something(delta: Delta, asked: CompletionRequest) -> bool:
    """Tokens whose text is held back (half a character, maybe a stop string) make no chunk of their own."""
    wants_tokens = asked.return_token_ids or asked.logprobs is not None
    return bool(delta.text or delta.finish_reason or (wants_tokens and delta.token_ids))
