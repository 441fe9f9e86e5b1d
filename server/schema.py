"""Request bodies as typed structs. ``server.fields`` says which fields exist; a test keeps the two equal.

Types are strict: ``"1"`` is no number, ``1`` is no boolean, ``1.5`` is no integer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from server.errors import ApiError, bad_request
from server.fields import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDINGS,
    LOAD_LORA,
    RERANK,
    SCORE,
    TOKENIZE,
    UNLOAD_LORA,
    WEIGHTS,
    Route,
    applied_fields,
)

Prompt = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # only false: nothing is obfuscated


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat have in common. Names that ``SamplingParams`` has too mean the same."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool = False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Prompt | None = None
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """With ``messages``, the fields that make a prompt of them are those of chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class WeightsRequest(msgspec.Struct, kw_only=True):
    """``version``: the number after the present one if it is not given. Values are checked by the engine."""

    path: str | None = None
    version: int | str | None = None
    kv_cache: str = "keep"


class LoadLoraRequest(msgspec.Struct, kw_only=True):
    lora_name: str | None = None
    lora_path: str | None = None


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    lora_name: str | None = None


class PoolingRequest(msgspec.Struct, kw_only=True):
    """What embeddings and scores have in common."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    input: Prompt | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None  # vLLM's former name of use_activation


class ScoreRequest(PoolingRequest, kw_only=True):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class TextDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    query: str | None = None
    documents: list[str | TextDocument] | None = None
    top_n: int | None = None
    return_documents: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


STRUCTS: dict[str, type[msgspec.Struct]] = {
    COMPLETION: CompletionRequest,
    CHAT: ChatRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
    WEIGHTS: WeightsRequest,
    LOAD_LORA: LoadLoraRequest,
    UNLOAD_LORA: UnloadLoraRequest,
    EMBEDDINGS: EmbeddingRequest,
    SCORE: ScoreRequest,
    RERANK: RerankRequest,
}
T = TypeVar("T", bound=msgspec.Struct)


def decode(body: bytes, route: Route, struct: type[T]) -> T:
    """A body as its struct; raises ``ApiError`` 400 that names the field."""
    try:
        raw = _guard(lambda: msgspec.json.decode(body))
    except ApiError as error:
        raise _name_number(body, error) from None
    if not isinstance(raw, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    kept = applied_fields(route, raw)
    return _guard(lambda: msgspec.convert(kept, struct, strict=True))


def _name_number(body: bytes, error: ApiError) -> ApiError:
    """msgspec does not say which number is out of range; the standard library, which takes them all, finds it."""
    if "out of range" not in error.message:
        return error
    try:
        raw = json.loads(body, parse_int=lambda digits: int(digits) if len(digits) < 30 else math.inf)
    except (ValueError, RecursionError):
        return error
    names = [name for name, value in raw.items() if _has_huge(value)] if isinstance(raw, dict) else []
    return bad_request(names[0], f"{names[0]}: number out of range", code="invalid_type") if names else error


def _has_huge(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_huge, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _guard(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except msgspec.ValidationError as exc:
        raise _validation_error(str(exc)) from None
    except msgspec.DecodeError as exc:
        raise ApiError(400, f"the body is not valid JSON: {exc}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body's JSON is nested too deeply", code="invalid_json") from None
    except UnicodeError as exc:
        raise ApiError(400, f"the body is not valid UTF-8: {exc}", code="invalid_json") from None


def _validation_error(message: str) -> ApiError:
    """msgspec says ``Expected `int`, got `str` - at `$.a.b[0]` ``."""
    what, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if not path and "unknown field `" in what:
        path = what.split("`")[1]
    return bad_request(path or None, what[:1].lower() + what[1:].replace("`", "'"), code="invalid_type")
