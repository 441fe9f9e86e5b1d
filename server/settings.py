"""How the HTTP server runs. The command line makes one of these from its flags."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from lmjax.protocol import EngineInfo

MIB = 1024 * 1024


class SettingsError(ValueError):
    """A server flag is wrong; one line that names the flag, the value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """``validate()`` raises ``SettingsError``. Times are in seconds, sizes in bytes."""

    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None  # path of a Unix socket, instead of host and port
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()  # empty: the routes for weights, sleep and adapters are off
    lora_dir: str | None = None  # where adapters may be loaded from over HTTP; None: nowhere
    served_model_names: tuple[str, ...] = ()  # empty: the engine's own name of the model
    allowed_origins: tuple[str, ...] = ()  # CORS; "*" for all
    root_path: str = ""  # prefix that a proxy may leave on the path
    shutdown_timeout: float = 20.0  # how long running requests may go on after SIGTERM
    max_body_bytes: int = 32 * MIB
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    metrics_prefix: str = "lmjax"
    trust_request_chat_template: bool = False  # let requests bring a template (they can burn CPU with it)
    scheduling_policy: str = "fcfs"  # of the engine: a priority needs "priority"
    offload_bytes: int = 50_000  # longer bodies are decoded and tokenized off the event loop
    stall_timeout: float = 120.0  # a stream's reader that takes nothing for so long is cut
    log_level: str = "info"

    def validate(self) -> ServerSettings:
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise SettingsError(f"--port: got {self.port!r}, must be between 0 and 65535")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise SettingsError("--api-key: a key must be printable ASCII and not empty")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.admin_api_keys):
            raise SettingsError("--admin-api-key: a key must be printable ASCII and not empty")
        if set(self.admin_api_keys) & set(self.api_keys):
            raise SettingsError("--admin-api-key: must differ from --api-key, which every client has")
        if self.lora_dir is not None:
            if not self.admin_api_keys:
                raise SettingsError("--lora-dir: needs --admin-api-key: without it /v1/load_lora_adapter is off")
            if not Path(self.lora_dir).is_dir():
                raise SettingsError(f"--lora-dir: there is no directory {self.lora_dir}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise SettingsError(f"--root-path: got {self.root_path!r}, must start with / and not end with it")
        if self.shutdown_timeout < 0:
            raise SettingsError(f"--shutdown-timeout: got {self.shutdown_timeout}, must be 0 or more")
        if self.max_body_bytes < 1024:
            raise SettingsError(f"--max-body-bytes: got {self.max_body_bytes}, must be at least 1024")
        if not self.metrics_prefix.replace("_", "").isalnum() or self.metrics_prefix[0].isdigit():
            raise SettingsError(f"--metrics-prefix: got {self.metrics_prefix!r}, must be letters, digits and _")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise SettingsError("--ssl-certfile and --ssl-keyfile go together")
        for flag, path in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if path and not Path(path).is_file():
                raise SettingsError(f"{flag}: there is no file {path}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise SettingsError(f"--log-level: got {self.log_level!r}, must be debug, info, warning or error")
        return self

    @property
    def address(self) -> str:
        """For people: where the server listens."""
        if self.uds:
            return f"unix:{self.uds}"
        scheme = "https" if self.ssl_certfile else "http"
        try:
            host = f"[{self.host}]" if ipaddress.ip_address(self.host).version == 6 else self.host
        except ValueError:
            host = self.host
        return f"{scheme}://{host}:{self.port}"

    @property
    def example(self) -> str:
        """A curl command that asks this server something."""
        body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
        return self._example("chat/completions", body)

    def example_for(self, info: EngineInfo) -> str:
        """Something that this engine can answer."""
        if info.generates:
            return self.example
        if info.pooling is not None and info.pooling.task == "score":
            return self._example("rerank", '{"query": "a question", "documents": ["an answer", "another answer"]}')
        return self._example("embeddings", '{"input": ["a text", "another"]}')

    def _example(self, route: str, body: str) -> str:
        socket, base = (f"--unix-socket {self.uds} ", "http://localhost") if self.uds else ("", self.address)
        for every in ("//0.0.0.0:", "//[::]:"):
            base = base.replace(every, "//localhost:")
        key = "-H 'Authorization: Bearer KEY' " if self.api_keys else ""
        return f"curl {socket}{base}/v1/{route} {key}-H 'Content-Type: application/json' -d '{body}'"
