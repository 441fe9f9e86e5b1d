"""Chat messages of the OpenAI API, checked and put into the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from lmjax.text.tokenizer import clean_text
from lmjax.types import ParameterError

# part type -> the key of its text
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "thinking", "reasoning")


def prepare_messages(messages: Any, *, parts: bool = False, strings: bool = True) -> list[dict[str, Any]]:
    """Checked copies of ``messages``, of plain JSON values, for a template.

    ``parts``: the template loops over lists of parts, so they stay lists; else their texts are joined by newlines.
    ``strings=False``: the template knows parts only, so a string becomes one part. Null or missing content is ``""``,
    other nulls are left out, arguments of tool calls become objects. Raises ``ParameterError`` naming the place.
    """
    if not isinstance(messages, list):
        raise ParameterError("messages", f"got {_kind(messages)}, must be a list of messages")
    if not messages:
        raise ParameterError("messages", "got [], must hold at least one message")
    return [_message(message, f"messages[{i}]", parts, strings) for i, message in enumerate(messages)]


def _message(message: Any, where: str, parts: bool, strings: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ParameterError(where, f"got {_kind(message)}, must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ParameterError(f"{where}.role", f"got {role!r}, must be a non-empty string")
    result = {key: plain(value) for key, value in message.items() if value is not None}
    result["content"] = _content(message.get("content"), f"{where}.content", parts, strings)
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
        if not result["tool_calls"]:
            del result["tool_calls"]
    reasoning = next((result[key] for key in _REASONING if key in result), None)
    if reasoning is not None:
        # templates read it under either name
        result = {"thinking": reasoning} | result | {"reasoning_content": reasoning}
    return result


def _content(content: Any, where: str, parts: bool, strings: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return "" if strings else []
    if isinstance(content, str):
        text = clean_text(content)
        return text if strings else [{"type": "text", "text": text}]
    if not isinstance(content, list):
        raise ParameterError(where, f"got {_kind(content)}, must be a string or a list of parts")
    texts = [_part_text(part, f"{where}[{j}]") for j, part in enumerate(content)]
    if parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return clean_text(part)
    if not isinstance(part, dict):
        raise ParameterError(where, f"got {_kind(part)}, must be an object with type and text")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise ParameterError(f"{where}.type", f"got {kind!r}, this model takes only {', '.join(_TEXT_PARTS)}")
    key = _TEXT_PARTS[kind]
    if not isinstance(part.get(key), str):
        raise ParameterError(f"{where}.{key}", f"got {_kind(part.get(key))}, must be a string")
    return clean_text(part[key])


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ParameterError(where, f"got {_kind(calls)}, must be a list of tool calls")
    return [_tool_call(call, f"{where}[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise ParameterError(where, "must be an object with a function of name and arguments")
    function = call["function"]
    if not isinstance(function.get("name"), str):
        raise ParameterError(f"{where}.function.name", f"got {_kind(function.get('name'))}, must be a string")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return plain(call) | {"function": plain(function) | {"arguments": arguments}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments in (None, ""):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ParameterError(where, f"must be a JSON object as a string: {error}") from None
    if not isinstance(arguments, dict):
        raise ParameterError(where, f"got {_kind(arguments)}, must be a JSON object")
    return plain(arguments)


def plain(value: Any) -> Any:
    """A copy of plain JSON values, whose strings have a UTF-8 form; anything else becomes its type's name.

    Templates are untrusted: objects with methods must not reach them.
    """
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return clean_text(str.__str__(value))
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
