"""Chat messages, checked strictly: every key is known, so nothing of a message is dropped without a word.

The form that templates expect (joined text parts, arguments as objects) is made by ``lmjax.text.chat``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from server.errors import bad_request

ROLES = ("system", "developer", "user", "assistant", "tool")
# keys of our own (and others') replies, accepted when they come back as history; what their values must be
_REPLY_KEYS: dict[str, Any] = {
    "refusal": str,
    "annotations": list[Any],
    "reasoning_content": str,
    "cache_control": dict[str, Any],
    "name": str,
    "tool_call_id": str,
}
_NULL_KEYS = ("audio", "function_call")
_KEYS = {"role", "content", "tool_calls", *_REPLY_KEYS, *_NULL_KEYS}
_NOT_FOR_TEMPLATES = ("refusal", "annotations", "cache_control", *_NULL_KEYS)


def check_messages(messages: list[dict[str, Any]] | None, template: str) -> list[dict[str, Any]]:
    """The messages as ``render_chat`` takes them; raises ``ApiError`` 400 that names the message and the key.

    ``template``: text of the chat template; one that knows no ``developer`` role gets those messages as ``system``.
    """
    if not messages:
        raise bad_request("messages", "must hold at least one message", code="missing_field")
    roles = {} if "developer" in template else {"developer": "system"}
    return [_message(message, f"messages[{i}]", roles) for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, roles: dict[str, str]) -> dict[str, Any]:
    for key in message:
        if key not in _KEYS:
            raise bad_request(f"{where}.{key[:64]}", "unknown key of a message", code="unknown_field")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        shown = f"got {role[:40]!r}, " if isinstance(role, str) else ""
        raise bad_request(f"{where}.role", f"{shown}must be one of {', '.join(ROLES)}")
    for key in _NULL_KEYS:
        if message.get(key) is not None:
            raise bad_request(f"{where}.{key}", "is not supported yet; only null is accepted", code="unsupported")
    for key, kind in _REPLY_KEYS.items():
        _check_type(message.get(key), kind, f"{where}.{key}")
    if message.get("tool_calls") and role != "assistant":
        raise bad_request(f"{where}.tool_calls", "only assistant messages have tool calls")
    _check_content(message.get("content"), f"{where}.content", may_lack=role == "assistant")
    kept = {key: value for key, value in message.items() if key not in _NOT_FOR_TEMPLATES}
    return kept | {"role": roles.get(role, role)}


def _check_content(content: Any, where: str, may_lack: bool) -> None:
    if content is None and not may_lack:
        raise bad_request(where, "is missing", code="missing_field")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise bad_request(where, "must be a string or a list of text parts", code="invalid_type")
    if not content:
        raise bad_request(where, "got [], must hold at least one part")
    for i, part in enumerate(content):
        _check_part(part, f"{where}[{i}]")


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise bad_request(where, "must be an object with a type", code="invalid_type")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        shown = repr(kind[:40]) if isinstance(kind, str) else "no type"
        raise bad_request(f"{where}.type", f"got {shown}; only text parts are supported", code="unsupported")
    for key in part:
        if key not in ("type", kind, "cache_control"):
            raise bad_request(f"{where}.{key[:64]}", "unknown key of a content part", code="unknown_field")
    _check_type(part.get("cache_control"), dict[str, Any], f"{where}.cache_control")
    if not isinstance(part.get(kind), str):
        raise bad_request(f"{where}.{kind}", "must be a string", code="invalid_type")


def _check_type(value: Any, kind: Any, where: str) -> None:
    if value is None:
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        message = str(exc).partition(" - at ")[0].replace("`", "'")
        raise bad_request(where, message[:1].lower() + message[1:], code="invalid_type") from None
