"""``/v1/score`` in vLLM's shape and ``/v1/rerank`` in Jina's and Cohere's.

A cross-encoder reads both texts of a pair together; of any other model the score is the cosine of the embeddings.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from operator import mul
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from lmjax.protocol import EngineClient, Pooled
from lmjax.types import ParameterError, PoolingParams
from server.body import json_response, read_body
from server.errors import bad_request, to_api_error
from server.fields import RERANK, SCORE
from server.openai.embeddings import check_task, to_floats
from server.pooling import PoolingUsage, PoolJob, check_count, make_job, pooling_params, run_all, usage_of
from server.prepare import is_heavy
from server.schema import PoolingRequest, RerankRequest, ScoreRequest, decode
from server.state import STATE, new_id


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class Scores(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: str = "list"


class Document(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct):
    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage


@dataclass(frozen=True, slots=True)
class _Work:
    """``pairs``: indices of the jobs that make each score: one job, or the two that are compared."""

    asked: Any
    params: PoolingParams
    jobs: list[PoolJob]
    pairs: list[tuple[int, ...]]
    documents: list[str]


async def score(request: web.Request) -> web.Response:
    work, scores, found, model = await _run(request, _prepare_score)
    data = [Score(i, value) for i, value in enumerate(scores)]
    return json_response(Scores(new_id("score", work.asked.request_id), int(time.time()), model, data, usage_of(found)))


async def rerank(request: web.Request) -> web.Response:
    work, scores, found, model = await _run(request, _prepare_rerank)
    ranked = [
        Ranked(i, value, Document(work.documents[i]) if work.asked.return_documents else UNSET)
        for i, value in enumerate(scores)
    ]
    ranked.sort(key=lambda result: -result.relevance_score)  # stable: equal ones keep their order
    results = ranked[: work.asked.top_n or len(ranked)]
    return json_response(Ranking(new_id("rerank", work.asked.request_id), model, results, usage_of(found)))


async def _run(request: web.Request, prepare: Any) -> tuple[_Work, list[float], list[Pooled], str]:
    state = request.app[STATE]
    client = state.admit()
    body = await read_body(request)
    work = await state.offload(is_heavy(body, state.settings), prepare, body, client)
    model = state.model_name(work.asked.model)
    found = await run_all(request, state, client, work.jobs, work.params, work.asked, state.lora_of(model))
    values = [to_floats(result.values) for result in found]
    return work, [_score([values[i] for i in pair]) for pair in work.pairs], found, model


def _score(values: list[list[float]]) -> float:
    if len(values) == 1:
        return values[0][0]
    a, b = values
    norms = math.sqrt(sum(map(mul, a, a)) * sum(map(mul, b, b)))
    return sum(map(mul, a, b)) / max(norms, 1e-12)


def _prepare_score(body: bytes, client: EngineClient) -> _Work:
    asked = decode(body, SCORE, ScoreRequest)
    first_name, first = _one_of(asked, "text_1", "queries")
    second_name, second = _one_of(asked, "text_2", "documents")
    firsts = [first] if isinstance(first, str) else first
    seconds = [second] if isinstance(second, str) else second
    check_count(first_name, len(firsts))
    check_count(second_name, len(seconds))
    if len(firsts) not in (1, len(seconds)):
        raise bad_request(first_name, f"got {len(firsts)} texts for {len(seconds)}, must be one or as many")
    fields = _places(first_name, first), _places(second_name, second)
    return _work(client, asked, firsts, seconds, fields)


def _places(field: str, texts: str | list[str]) -> list[str]:
    """What errors call each of the texts."""
    return [field] if isinstance(texts, str) else [f"{field}[{i}]" for i in range(len(texts))]


def _one_of(asked: ScoreRequest, *names: str) -> tuple[str, Any]:
    """A field that has two names."""
    given = [name for name in names if getattr(asked, name) is not None]
    if not given:
        raise bad_request(names[0], "is missing", code="missing_field")
    if len(given) > 1:
        raise bad_request(names[1], f"is given beside {names[0]}, which means the same")
    return given[0], getattr(asked, given[0])


def _prepare_rerank(body: bytes, client: EngineClient) -> _Work:
    asked = decode(body, RERANK, RerankRequest)
    for name in ("query", "documents"):
        if getattr(asked, name) is None:
            raise bad_request(name, "is missing", code="missing_field")
    assert asked.query is not None and asked.documents is not None
    if asked.top_n is not None and asked.top_n < 0:
        raise bad_request("top_n", f"got {asked.top_n}, must be an integer of at least 0 (0: all)")
    documents = [document if isinstance(document, str) else document.text for document in asked.documents]
    check_count("documents", len(documents))
    return _work(client, asked, [asked.query], documents, (["query"], _places("documents", documents)))


def _work(
    client: EngineClient,
    asked: PoolingRequest,
    firsts: list[str],
    seconds: list[str],
    fields: tuple[list[str], list[str]],
) -> _Work:
    """firsts: one for all of the seconds, or as many. fields: what errors call each of both."""
    times = len(seconds) // len(firsts)
    pairs = list(zip(firsts * times, seconds, strict=True))
    try:
        params = pooling_params(asked)
    except ParameterError as error:
        raise to_api_error(error, {}) from None
    pooling = client.info.pooling
    if pooling is not None and pooling.task == "score":
        jobs = [
            make_job(client, first, params, field, second)
            for (first, second), field in zip(pairs, fields[1], strict=True)
        ]
        return _Work(asked, params, jobs, [(i,) for i in range(len(jobs))], seconds)
    check_task(client, "embed")
    if asked.use_activation is not None:
        raise bad_request("use_activation", "is for cross-encoders; a cosine does not depend on it", code="unsupported")
    names = dict(zip(reversed([*firsts, *seconds]), reversed([*fields[0], *fields[1]]), strict=True))  # the first wins
    texts = {text: i for i, text in enumerate(dict.fromkeys([*firsts, *seconds]))}
    jobs = [make_job(client, text, params, names[text]) for text in texts]
    return _Work(asked, params, jobs, [(texts[first], texts[second]) for first, second in pairs], seconds)
