"""The server's public names."""

from __future__ import annotations

from server.lifecycle import run_server
from server.routes import attach, make_app
from server.settings import ServerSettings, SettingsError

__all__ = ["ServerSettings", "SettingsError", "attach", "make_app", "run_server"]
