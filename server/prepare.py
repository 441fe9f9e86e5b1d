"""From a request's body to prompts that can run: decode, check, render, tokenize. Plain functions that may run in a
thread (they do for long bodies), so they touch nothing that changes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from lmjax.protocol import EngineClient
from lmjax.text.chat import render_chat
from lmjax.types import ParameterError, SamplingParams
from server.errors import bad_request, to_api_error
from server.fields import CHAT, COMPLETION
from server.messages import check_messages
from server.params import renames, sampling_params
from server.schema import ChatRequest, CompletionRequest, Prompt, TokenizeRequest, decode
from server.settings import ServerSettings

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 1024
MAX_CHOICES = 2048  # prompts times n
# A tokenizer's normalizer may shorten a text, so a text is only refused unseen when it is this many times too long.
_LENGTH_MARGIN = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt that is ready to run. ``text``: the prompt as text, or None where it came as ids."""

    ids: list[int]
    params: SamplingParams
    text: str | None = None


def prepare_completion(
    body: bytes, client: EngineClient, settings: ServerSettings
) -> tuple[CompletionRequest, list[Job]]:
    request = decode(body, COMPLETION, CompletionRequest)
    prompts = split_prompts(request.prompt)
    try:
        params = sampling_params(request, client.info, settings)
        if len(prompts) * params.n > MAX_CHOICES:
            raise bad_request("n", f"prompts times n is {len(prompts) * params.n}, at most {MAX_CHOICES} are allowed")
        special = True if request.add_special_tokens is None else request.add_special_tokens
        jobs = [_completion_job(prompt, params, special, client) for prompt in prompts]
    except ParameterError as exc:
        raise to_api_error(exc, renames(request)) from None
    return request, jobs


def prepare_chat(body: bytes, client: EngineClient, settings: ServerSettings) -> tuple[ChatRequest, Job]:
    request = decode(body, CHAT, ChatRequest)
    text = chat_prompt(request, client, settings)
    try:
        params = sampling_params(request, client.info, settings)
        ids = _encode(client, text, bool(request.add_special_tokens), params)
        ids, params = client.validate(ids, params)
    except ParameterError as exc:
        raise to_api_error(exc, renames(request)) from None
    return request, Job(ids, params, text)


def split_prompts(prompt: Prompt | None, field: str = "prompt", most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """The four shapes of ``prompt``: a text, texts, ids, lists of ids. Raises ``ApiError`` for others."""
    if prompt is None:
        raise bad_request(field, "is missing", code="missing_field")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request(field, "got [], must not be empty")
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise bad_request(field, "must hold only texts, only token ids or only lists of token ids")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > most:
        raise bad_request(field, f"got {len(prompt)} prompts, at most {most} are allowed")
    return prompt  # type: ignore[return-value]


def chat_prompt(request: ChatRequest | TokenizeRequest, client: EngineClient, settings: ServerSettings) -> str:
    """The messages as the model's chat template shows them; raises ``ApiError``."""
    own = client.tokenizer.chat_template
    given = request.chat_template
    # the name of one of the model's own templates is no template of the request's
    named = isinstance(own, dict) and given in own
    if given is not None and not named and not settings.trust_request_chat_template:
        raise bad_request(
            "chat_template", "needs a server started with --trust-request-chat-template", code="unsupported"
        )
    messages = check_messages(request.messages, str(given or own))
    generation_prompt = request.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not request.continue_final_message
    try:
        return render_chat(
            client.tokenizer,
            messages,
            chat_template=given,
            add_generation_prompt=generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.chat_template_kwargs,
        )
    except ParameterError as exc:
        raise to_api_error(exc) from None


def _completion_job(prompt: str | list[int], params: SamplingParams, special: bool, client: EngineClient) -> Job:
    text = prompt if isinstance(prompt, str) else None
    ids = _encode(client, prompt, special, params) if isinstance(prompt, str) else prompt
    ids, checked = client.validate(ids, params)
    if params.max_tokens is None:
        checked = replace(checked, max_tokens=min(COMPLETION_MAX_TOKENS, checked.max_tokens or 1))
    return Job(ids, checked, None if params.truncate_prompt_tokens is not None else text)


def _encode(client: EngineClient, text: str, special: bool, params: SamplingParams) -> list[int]:
    if params.truncate_prompt_tokens is None:
        check_length(client, text)
    return client.tokenizer.encode(text, add_special_tokens=special)


def check_length(client: EngineClient, text: str) -> None:
    """Refuses a text that is far beyond the context without tokenizing it."""
    limit = client.info.max_model_len
    least = len(text) // longest_token(client.tokenizer)
    if least > limit * _LENGTH_MARGIN:
        raise ParameterError("prompt", f"has at least {least} tokens, but the model's context length is {limit} tokens")


@functools.lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Characters of the vocabulary's longest token, at least 1."""
    return max((len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size)), default=1) or 1


def is_heavy(body: bytes, settings: ServerSettings) -> bool:
    """Bodies that keep the event loop busy for too long. A template from the request may do so at any length."""
    return len(body) > settings.offload_bytes or (settings.trust_request_chat_template and b"chat_template" in body)
