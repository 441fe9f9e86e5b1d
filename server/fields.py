"""The one table of request fields: what is applied, accepted as a hint, accepted with a neutral value only, refused.

A field that is in no row is refused with a 400 that names it. ``null`` counts as absent everywhere.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from server.errors import ApiError, bad_request

Kind = Literal["applied", "neutral", "hint", "refused"]
Route = Literal[
    "completions",
    "chat",
    "tokenize",
    "detokenize",
    "weights",
    "load_lora",
    "unload_lora",
    "embeddings",
    "score",
    "rerank",
]
COMPLETION: Route = "completions"
CHAT: Route = "chat"
TOKENIZE: Route = "tokenize"
DETOKENIZE: Route = "detokenize"
WEIGHTS: Route = "weights"
LOAD_LORA: Route = "load_lora"
UNLOAD_LORA: Route = "unload_lora"
EMBEDDINGS: Route = "embeddings"
SCORE: Route = "score"
RERANK: Route = "rerank"


@dataclass(frozen=True, slots=True)
class Field:
    kind: Kind
    reason: str = ""  # of neutral and refused fields: why other values are refused
    neutral: tuple[Any, ...] = ()
    type: Any = None  # of hints: what a value must be


def _applied(names: str) -> dict[str, Field]:
    return {name: Field("applied") for name in names.split()}


def _refused(reason: str, names: str) -> dict[str, Field]:
    return {name: Field("refused", reason) for name in names.split()}


_NOT_YET = "is not supported yet"
_TOOLS = "tool calling is not supported yet"
_GRAMMAR = "structured output is not supported yet"
_BEAM = "beam search is not supported yet"

_GENERATION = (
    _applied(
        "model stream stream_options n temperature top_p top_k min_p seed presence_penalty frequency_penalty "
        "repetition_penalty logit_bias allowed_token_ids bad_words stop stop_token_ids include_stop_str_in_output "
        "ignore_eos max_tokens max_completion_tokens min_tokens logprobs prompt_logprobs skip_special_tokens "
        "spaces_between_special_tokens truncate_prompt_tokens priority request_id cache_salt add_special_tokens "
        "return_token_ids"
    )
    | {
        "user": Field("hint", type=str),
        "safety_identifier": Field("hint", type=str),
        "metadata": Field("hint", type=dict[str, str]),
        "service_tier": Field("hint", type=Literal["auto", "default"]),
        "prompt_cache_key": Field("hint", type=str),
    }
    | {
        "use_beam_search": Field("neutral", _BEAM, (False,)),
        "length_penalty": Field("neutral", _BEAM, (1.0,)),
        "early_stopping": Field("neutral", _BEAM, (False,)),
        "response_format": Field("neutral", _GRAMMAR, ({"type": "text"},)),
    }
    | _refused(
        _GRAMMAR,
        "structured_outputs guided_json guided_regex guided_choice guided_grammar guided_json_object "
        "guided_decoding_backend guided_whitespace_pattern",
    )
    | _refused(
        _NOT_YET,
        "prompt_embeds return_tokens_as_token_ids logits_processors kv_transfer_params vllm_xargs "
        "allowed_token_strings detokenize",
    )
)

_POOLING = _applied("model truncate_prompt_tokens use_activation priority request_id cache_salt") | {
    "user": Field("hint", type=str),
    "mm_processor_kwargs": Field("refused", "images and audio are not supported"),
}

FIELDS: dict[str, dict[str, Field]] = {
    COMPLETION: _GENERATION
    | _applied("prompt echo")
    | {
        "suffix": Field("neutral", "filling in the middle is not supported yet", ("",)),
        # equal to n: checked where n is known (params.check_best_of)
        "best_of": Field("applied"),
    },
    CHAT: _GENERATION
    | _applied("messages top_logprobs add_generation_prompt continue_final_message chat_template chat_template_kwargs")
    | {
        "store": Field("hint", type=bool),
        "parallel_tool_calls": Field("hint", type=bool),
        "prediction": Field("hint", type=dict[str, Any]),
    }
    | {
        "tools": Field("neutral", _TOOLS, ([],)),
        "tool_choice": Field("neutral", _TOOLS, ("none",)),
        "functions": Field("neutral", _TOOLS, ([],)),
        "function_call": Field("neutral", _TOOLS, ("none",)),
        "modalities": Field("neutral", "only text is supported", (["text"],)),
        "echo": Field("neutral", _NOT_YET + " for chat", (False,)),
    }
    | _refused("audio is not supported", "audio")
    | _refused("web search is not supported", "web_search_options")
    | _refused("images and audio are not supported", "mm_processor_kwargs media_io_kwargs")
    | _refused(
        _NOT_YET,
        "reasoning_effort reasoning include_reasoning thinking_token_budget verbosity documents prompt_cache_retention",
    ),
    TOKENIZE: _applied(
        "model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message "
        "chat_template chat_template_kwargs"
    )
    | {"tools": Field("neutral", _TOOLS, ([],))}
    | _refused("images and audio are not supported", "mm_processor_kwargs media_io_kwargs"),
    DETOKENIZE: _applied("model tokens"),
    WEIGHTS: _applied("path version kv_cache"),
    LOAD_LORA: _applied("lora_name lora_path")
    | {
        "load_inplace": Field(
            "neutral", "an adapter is not changed under requests: unload it, then load the other one", (False,)
        )
    }
    | _refused("adapters here are PEFT's, one matrix a module", "is_3d_lora_weight"),
    UNLOAD_LORA: _applied("lora_name") | _refused("adapters are named by lora_name alone", "lora_int_id"),
    EMBEDDINGS: _POOLING
    | _applied("input encoding_format dimensions add_special_tokens normalize")
    | {
        "embed_dtype": Field("neutral", "embeddings are float32", ("float32",)),
        "endianness": Field("neutral", "embeddings are little-endian", ("little", "native")),
    }
    | _refused(_NOT_YET, "messages chat_template chat_template_kwargs input_type"),
    SCORE: _POOLING | _applied("text_1 text_2 queries documents") | _refused(_NOT_YET, "instruction chat_template"),
    RERANK: _POOLING
    | _applied("query documents top_n return_documents")
    | _refused(_NOT_YET, "instruction chat_template max_tokens_per_doc max_chunks_per_doc rank_fields"),
}


def applied_fields(route: Route, body: dict[str, Any]) -> dict[str, Any]:
    """The applied fields of a body that are not null; raises ``ApiError`` for what must not be there."""
    table = FIELDS[route]
    kept: dict[str, Any] = {}
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            raise _unknown(name, table)
        if value is None:
            continue
        if field.kind == "applied":
            kept[name] = value
        elif field.kind == "refused":
            raise bad_request(name, field.reason, code="unsupported")
        elif field.kind == "neutral":
            _check_neutral(name, field, value)
        else:
            _check_hint(name, field, value)
    return kept


def _check_neutral(name: str, field: Field, value: Any) -> None:
    for neutral in field.neutral:
        # 1 == True in Python, so booleans are told apart from numbers
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
            return
    allowed = " or ".join(msgspec.json.encode(v).decode() for v in field.neutral)
    raise bad_request(name, f"{field.reason}; the only value accepted is {allowed}", code="unsupported")


def _check_hint(name: str, field: Field, value: Any) -> None:
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as exc:
        raise bad_request(name, str(exc)) from None


def _unknown(name: str, table: dict[str, Field]) -> ApiError:
    shown = name if len(name) <= 64 else name[:61] + "..."
    near = difflib.get_close_matches(name[:64], table, n=1, cutoff=0.75)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return ApiError(400, f"unknown field '{shown}'{hint}", param=shown, code="unknown_field")
