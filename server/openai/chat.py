"""``/v1/chat/completions``."""

from __future__ import annotations

import time

from aiohttp import web
from msgspec import UNSET

from lmjax.protocol import EngineClient
from lmjax.types import Delta, RequestUpdate, TokenLogprobs
from server.body import json_response, read_body
from server.generation import Generation
from server.logprobs import chat_logprobs, prompt_logprobs
from server.openai.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Head,
)
from server.prepare import Job, is_heavy, prepare_chat
from server.schema import ChatRequest
from server.serve import collect, stream, total_usage
from server.sse import EventStream
from server.state import STATE, new_id


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    client = state.admit()
    body = await read_body(request)
    asked, job = await state.offload(is_heavy(body, state.settings), prepare_chat, body, client, state.settings)
    model = state.model_name(asked.model)
    head = Head(new_id("chatcmpl", asked.request_id), int(time.time()), model)
    generation = Generation(
        client,
        state.metrics,
        [job],
        lora=state.lora_of(model),
        priority=asked.priority,
        cache_salt=asked.cache_salt,
    )
    if asked.stream:
        events = EventStream(request, head, "chat.completion.chunk", asked.include_usage)
        chunks = _Chunks(client, asked, job, events, generation)
        return await stream(request, state, generation, events, chunks.render, asked.include_usage)
    answer = _Answer(client, asked, job)
    await collect(request, state, generation, answer.take)
    return json_response(answer.reply(head, generation))


def _logprobs(client: EngineClient, asked: ChatRequest, delta: Delta) -> ChatLogprobs | None:
    return chat_logprobs(client.tokenizer, delta.logprobs or []) if asked.logprobs else None


class _Answer:
    """The choices of a plain request."""

    def __init__(self, client: EngineClient, asked: ChatRequest, job: Job):
        self._client, self._asked, self._job = client, asked, job
        self._choices = [Delta(i) for i in range(job.params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] = []

    def take(self, _: int, update: RequestUpdate) -> None:
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        for delta in update.deltas:
            self._choices[delta.index].merge(delta)

    def reply(self, head: Head, generation: Generation) -> ChatCompletion:
        asked = self._asked
        reply = ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(d) for d in self._choices],
            usage=total_usage(generation),
        )
        if asked.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(
                self._client.tokenizer, self._prompt_logprobs, asked.prompt_logprobs
            )
        if asked.return_token_ids:
            reply.prompt_token_ids = self._job.ids
        return reply

    def _choice(self, whole: Delta) -> ChatChoice:
        return ChatChoice(
            index=whole.index,
            message=ChatMessage(whole.text),
            logprobs=_logprobs(self._client, self._asked, whole),
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            token_ids=whole.token_ids if self._asked.return_token_ids else UNSET,
            weight_versions=whole.weight_versions if self._asked.return_token_ids else UNSET,
        )


class _Chunks:
    """Updates as chunks of a stream: a choice's first chunk has the role, its last the finish reason."""

    def __init__(self, client: EngineClient, asked: ChatRequest, job: Job, events: EventStream, generation: Generation):
        self._client, self._asked, self._job, self._events = client, asked, job, events
        self._generation = generation if asked.continuous_usage else None
        self._opened = [False] * job.params.n

    def render(self, _: int, update: RequestUpdate) -> None:
        for delta in update.deltas:
            if not self._opened[delta.index]:
                self._open(delta.index)
            if _says_something(delta, self._asked):
                self._add(self._choice(delta))

    def _open(self, index: int) -> None:
        first = not any(self._opened)
        self._opened[index] = True
        extra = {"prompt_token_ids": self._job.ids} if first and self._asked.return_token_ids else None
        self._add(ChatChunkChoice(index, ChatDelta(role="assistant", content="")), extra)

    def _add(self, choice: ChatChunkChoice, extra: dict | None = None) -> None:
        usage = total_usage(self._generation) if self._generation else None
        self._events.add(choice, usage, extra)

    def _choice(self, delta: Delta) -> ChatChunkChoice:
        choice = ChatChunkChoice(delta.index, ChatDelta(content=delta.text or None), finish_reason=delta.finish_reason)
        if self._asked.logprobs and delta.logprobs:
            choice.logprobs = _logprobs(self._client, self._asked, delta)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._asked.return_token_ids:
            choice.token_ids, choice.weight_versions = delta.token_ids, delta.weight_versions
        return choice


def _says_something(delta: Delta, asked: ChatRequest) -> bool:
    """Tokens whose text is held back (half a character, maybe a stop string) make no chunk of their own."""
    wants_tokens = asked.return_token_ids or asked.logprobs
    return bool(delta.text or delta.finish_reason or (wants_tokens and delta.token_ids))
