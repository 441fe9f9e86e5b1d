"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lmjax.protocol import EngineClient
from server.body import json_response, read_body
from server.errors import bad_request
from server.fields import DETOKENIZE, TOKENIZE
from server.prepare import chat_prompt, is_heavy
from server.schema import DetokenizeRequest, TokenizeRequest, decode
from server.settings import ServerSettings
from server.state import STATE

_CHAT_ONLY = ("add_generation_prompt", "chat_template", "chat_template_kwargs")


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    client = state.engine()
    body = await read_body(request)
    heavy = is_heavy(body, state.settings)
    asked, reply = await state.offload(heavy, _tokenize, body, client, state.settings)
    state.model_name(asked.model)
    return json_response(reply)


def _tokenize(body: bytes, client: EngineClient, settings: ServerSettings) -> tuple[TokenizeRequest, dict[str, Any]]:
    asked = decode(body, TOKENIZE, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("prompt", "either prompt or messages must be given", code="missing_field")
    if asked.prompt is None:
        text, special = chat_prompt(asked, client, settings), bool(asked.add_special_tokens)
    else:
        for name in _CHAT_ONLY:
            if getattr(asked, name) is not None or asked.continue_final_message:
                raise bad_request(name, "goes with messages, not with prompt")
        text, special = asked.prompt, asked.add_special_tokens is not False
    ids = client.tokenizer.encode(text, add_special_tokens=special)
    strings = [client.tokenizer.token_text(i) for i in ids] if asked.return_token_strs else None
    limit = client.info.max_model_len
    return asked, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    client = state.engine()
    body = await read_body(request)
    asked, reply = await state.offload(is_heavy(body, state.settings), _detokenize, body, client)
    state.model_name(asked.model)
    return json_response(reply)


def _detokenize(body: bytes, client: EngineClient) -> tuple[DetokenizeRequest, dict[str, str]]:
    asked = decode(body, DETOKENIZE, DetokenizeRequest)
    if asked.tokens is None:
        raise bad_request("tokens", "is missing", code="missing_field")
    size = max(client.info.vocab_size, client.tokenizer.vocab_size)
    for token in asked.tokens:
        if not 0 <= token < size:
            raise bad_request("tokens", f"got the token id {token}, must be at least 0 and below {size}")
    return asked, {"prompt": client.tokenizer.decode(asked.tokens)}
