"""The aiohttp application: routes, middleware and the state they share."""

from __future__ import annotations

from aiohttp import web

from lmjax.protocol import EngineClient
from server import adapters, admin, probes
from server.metrics import ServerMetrics
from server.middleware import make_guard, make_headers, observe
from server.openai.chat import chat_completions
from server.openai.completions import completions
from server.openai.embeddings import embeddings
from server.openai.models import get_model, list_models
from server.openai.scores import rerank, score
from server.openai.tokenize import detokenize, tokenize
from server.settings import ServerSettings
from server.state import STATE, ServerState

ROUTES = (
    ("GET", "/health", probes.health),
    ("GET", "/ping", probes.health),
    ("POST", "/ping", probes.health),
    ("GET", "/ready", probes.ready),
    ("GET", "/version", probes.version),
    ("GET", "/metrics", probes.metrics),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{id:.+}", get_model),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/embeddings", embeddings),
    *(("POST", path, score) for path in ("/v1/score", "/score")),
    *(("POST", path, rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    *admin.ROUTES,
    *adapters.ROUTES,
)


def make_app(client: EngineClient | None, settings: ServerSettings) -> web.Application:
    """``client`` may be None and be given later with ``attach`` (the engine still loads)."""
    app = web.Application(
        middlewares=[observe, make_guard(settings)],
        client_max_size=settings.max_body_bytes,
        handler_args={"auto_decompress": False},  # compressed bodies are refused (read_body)
    )
    app[STATE] = ServerState(settings=settings, metrics=ServerMetrics(settings.metrics_prefix))
    for prefix in dict.fromkeys(("", settings.root_path)):
        for method, path, handler in ROUTES:
            # add_get takes HEAD, too: some load balancers probe with it
            add = app.router.add_get if method == "GET" else app.router.add_post
            add(prefix + path, handler)
    app.on_response_prepare.append(make_headers(settings))
    if client is not None:
        attach(app, client)
    return app


def attach(app: web.Application, client: EngineClient) -> None:
    """The engine is ready: requests are taken from now on."""
    state = app[STATE]
    state.client = client
    state.metrics.attach(state.model_names[0], client.reports, lambda: (client.weight_version, client.sleep_level))
