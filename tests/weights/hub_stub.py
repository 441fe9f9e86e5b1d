"""A stand-in for the Hugging Face hub on a local port: one model, one commit, files from a directory."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(files: Path, name: str = "org/tiny", token: str | None = None, gated: bool = False):
    """Yields (endpoint, list of requests as "METHOD path range"). With ``token``, others get 401."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = self.path.split("?")[0]
            requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
            authorized = token is None or self.headers.get("Authorization") == f"Bearer {token}"
            prefix = f"/api/models/{name}"
            if not path.startswith((prefix, f"/{name}/resolve/")):
                return self.send(b"{}", body, 404, {"X-Error-Code": "RepoNotFound"})
            if gated:
                return self.send(b"{}", body, 403, {"X-Error-Code": "GatedRepo"})
            if not authorized:
                return self.send(b"{}", body, 401, {"X-Error-Code": "RepoNotFound"})
            if "/revision/" in path and path.rsplit("/", 1)[1] not in ("main", "v1", COMMIT):
                return self.send(b"{}", body, 404, {"X-Error-Code": "RevisionNotFound"})
            if path.startswith(prefix + "/tree/"):
                return self.send(json.dumps([self.entry(p) for p in self.paths()]).encode(), body)
            if path.startswith(prefix):
                siblings = [{"rfilename": p} for p in self.paths()]
                return self.send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), body)
            return self.file(path.split("/", 5)[5], body)

        def paths(self):
            return [p.relative_to(files).as_posix() for p in sorted(files.rglob("*")) if p.is_file()]

        def entry(self, path):
            data = (files / path).read_bytes()
            return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

        def file(self, path, body):
            data = (files / path).read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send(data[start:], body, 206 if start else 200, headers)

        def send(self, data, body, status=200, headers=None):
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
