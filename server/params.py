"""From a request's fields to ``SamplingParams``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lmjax.protocol import EngineInfo
from lmjax.types import SamplingParams
from server.errors import bad_request
from server.schema import ChatRequest, CompletionRequest, GenerationRequest
from server.settings import ServerSettings

# fields that are not handed over under their own name and meaning; the others of SamplingParams are
_SPECIAL = {"logprobs", "logit_bias", "max_tokens"}
SAME = tuple(f.name for f in fields(SamplingParams) if f.name not in _SPECIAL)
MAX_LABEL = 128  # characters of request_id and cache_salt


def sampling_params(request: GenerationRequest, info: EngineInfo, settings: ServerSettings) -> SamplingParams:
    """Raises ``ApiError`` or ``ParameterError``. ``max_tokens`` is None where the request leaves it open."""
    values: dict[str, Any] = dict(info.default_sampling)
    for name in SAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    values.setdefault("max_tokens", None)
    for value in (request.max_tokens, request.max_completion_tokens):  # the newer name wins
        if value is not None:
            values["max_tokens"] = value
    if request.logit_bias is not None:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    values["logprobs"] = _logprobs(request)
    if isinstance(request, CompletionRequest):
        _completion_rules(request, values)
    _check_common(request, settings)
    return SamplingParams(**values)


def renames(request: GenerationRequest) -> dict[str, str]:
    """SamplingParams' names -> the request's own, for error messages."""
    names = {}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if isinstance(request, ChatRequest):
        names |= {"logprobs": "top_logprobs", "prompt": "messages"}
    return names


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", f"got {request.top_logprobs}, but logprobs is not true")
    return (request.top_logprobs or 0) if request.logprobs else None


def _completion_rules(request: CompletionRequest, values: dict[str, Any]) -> None:
    n = values.get("n", 1)
    if request.best_of is not None and request.best_of != n:
        raise bad_request("best_of", f"got {request.best_of}, must be equal to n ({n})", code="unsupported")
    if request.echo and request.logprobs is not None:
        values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if values["max_tokens"] == 0 and request.echo and request.max_completion_tokens is None:
        # only the prompt is wanted: one token is made and not shown (see openai/completions.py)
        values["max_tokens"] = 1


def _check_common(request: GenerationRequest, settings: ServerSettings) -> None:
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise bad_request("stream_options", "is only allowed when stream is true")
        if options.include_obfuscation:
            raise bad_request("stream_options.include_obfuscation", "is not supported yet", code="unsupported")
        if options.continuous_usage_stats and not options.include_usage:
            raise bad_request("stream_options.continuous_usage_stats", "needs include_usage")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs", "is not available in a stream; use echo and logprobs of completions")
    if request.priority and settings.scheduling_policy != "priority":
        raise bad_request("priority", "needs a server started with --scheduling-policy priority", code="unsupported")
    if not -(2**31) <= request.priority < 2**31:
        raise bad_request("priority", f"got {request.priority}, must be a 32-bit integer")
    check_names(request.request_id, request.cache_salt)


def check_names(request_id: str | None, cache_salt: str | None) -> None:
    for name, value in (("request_id", request_id), ("cache_salt", cache_salt)):
        if value is not None and not 1 <= len(value) <= MAX_LABEL:
            raise bad_request(name, f"got {len(value)} characters, must be 1 to {MAX_LABEL}")
    if request_id is not None and not is_label(request_id):
        raise bad_request("request_id", f"must be 1 to {MAX_LABEL} printable ASCII characters")


def is_label(text: str) -> bool:
    """May stand in a header and in a log line: 1-128 printable ASCII characters without white space."""
    return 1 <= len(text) <= MAX_LABEL and text.isascii() and text.isprintable() and " " not in text


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, value in given.items():
        # only plain decimal digits: int() would also take "1_0", " 1" and other scripts' digits
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request("logit_bias", f"got the key {key[:40]!r}, must be a token id")
        biases[int(key)] = value
    return biases
