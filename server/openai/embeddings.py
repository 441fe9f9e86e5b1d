"""``/v1/embeddings``."""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec
from aiohttp import web

from lmjax.protocol import EngineClient
from lmjax.types import ParameterError, PoolingParams
from server.body import json_response, read_body
from server.errors import bad_request, to_api_error
from server.fields import EMBEDDINGS
from server.pooling import MAX_TEXTS, PoolingUsage, PoolJob, make_job, pooling_params, run_all, usage_of
from server.prepare import is_heavy, split_prompts
from server.schema import EmbeddingRequest, decode
from server.state import STATE, new_id


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: str = "list"


async def embeddings(request: web.Request) -> web.Response:
    state = request.app[STATE]
    client = state.admit()
    body = await read_body(request)
    asked, params, jobs = await state.offload(is_heavy(body, state.settings), _prepare, body, client)
    model = state.model_name(asked.model)
    found = await run_all(request, state, client, jobs, params, asked, state.lora_of(model))
    encode = to_base64 if asked.encoding_format == "base64" else to_floats
    data = [Embedding(i, encode(result.values)) for i, result in enumerate(found)]
    reply = Embeddings(new_id("embd", asked.request_id), int(time.time()), model, data, usage_of(found))
    return await state.offload(len(data) > 16, json_response, reply)


def to_floats(values: bytes) -> list[float]:
    """values: float32, little-endian, as every platform of JAX has them."""
    floats: list[Any] = memoryview(values).cast("f").tolist()
    return floats


def to_base64(values: bytes) -> str:
    return base64.b64encode(values).decode()


def _prepare(body: bytes, client: EngineClient) -> tuple[EmbeddingRequest, PoolingParams, list[PoolJob]]:
    asked = decode(body, EMBEDDINGS, EmbeddingRequest)
    if asked.encoding_format not in ("float", "base64"):
        raise bad_request("encoding_format", f"got {asked.encoding_format!r:.100}, must be 'float' or 'base64'")
    if asked.normalize is not None:
        if asked.use_activation not in (None, asked.normalize):
            raise bad_request("normalize", f"got {asked.normalize}, but use_activation is {asked.use_activation}")
        asked.use_activation = asked.normalize
    check_task(client, "embed")
    prompts: list[Any] = split_prompts(asked.input, "input", MAX_TEXTS)
    try:
        params = pooling_params(asked, asked.dimensions)
    except ParameterError as error:
        raise to_api_error(error, {}) from None
    special = asked.add_special_tokens is not False
    names = [f"input[{i}]" for i in range(len(prompts))] if prompts is asked.input else ["input"]
    jobs = [
        make_job(client, prompt, params, name, add_special_tokens=special)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    return asked, params, jobs


def check_task(client: EngineClient, task: str) -> None:
    """Raises ``ApiError`` where the model does something else."""
    pooling = client.info.pooling
    if pooling is None:
        raise bad_request("model", "this engine cannot embed", code="unsupported")
    if pooling.task != task:
        raise bad_request("model", "it is a cross-encoder: it scores pairs and embeds nothing", code="unsupported")
