"""From chat messages to the text of a prompt."""

from __future__ import annotations

import copy
import json
from typing import Any

import jinja2

from lmjax.text.messages import plain, prepare_messages
from lmjax.text.templates import ChatTemplate, compile_template, why_invalid
from lmjax.text.tokenizer import Tokenizer
from lmjax.types import ParameterError

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """The prompt of a conversation; encode it with ``add_special_tokens=False``, the template writes its own.

    ``chat_template``: instead of the model's: a template, or the name of one of the model's. ``kwargs``: more
    variables for the template. ``continue_final_message``: the prompt ends inside the last message. Raises
    ``ParameterError`` naming the field, also when the template itself refuses the messages.
    """
    if add_generation_prompt and continue_final_message:
        raise ParameterError("continue_final_message", "cannot be combined with add_generation_prompt, set that false")
    if clash := set(kwargs or {}).intersection(_RESERVED):
        raise ParameterError("chat_template_kwargs", f"cannot set {', '.join(sorted(clash))}, they are own fields")
    for name, value in (("tools", tools), ("documents", documents)):
        if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
            raise ParameterError(name, "must be a list of objects")
    template = _compile(_choose(tokenizer, chat_template, tools))
    prepared = prepare_messages(messages, parts=template.takes_parts, strings=template.takes_strings)
    final = _tag_final(prepared) if continue_final_message else None
    variables = tokenizer.settings.special_tokens | plain(kwargs or {})
    variables |= {"tools": plain(tools or None), "documents": plain(documents)}
    text = _render(template, prepared, variables | {"add_generation_prompt": add_generation_prompt})
    return text if final is None else _cut_at_tag(text, final)


def _choose(tokenizer: Tokenizer, given: str | None, tools: list | None) -> str:
    own = tokenizer.chat_template
    if isinstance(own, dict):
        if given is not None:
            return own.get(given, given)
        name = "tool_use" if tools and "tool_use" in own else "default"
        if name not in own:
            raise ParameterError("chat_template", f"the model has several and no default: name one of {sorted(own)}")
        return own[name]
    if given is None and own is None:
        raise ParameterError("chat_template", "the model has no chat template; give one with --chat-template")
    return given if given is not None else own  # type: ignore[return-value]


def _compile(source: str) -> ChatTemplate:
    if not isinstance(source, str):
        raise ParameterError("chat_template", "must be a string")
    if reason := why_invalid(source):
        raise ParameterError("chat_template", reason)
    return compile_template(source)


def _render(template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    try:
        return _render_once(template, messages, variables)
    except TypeError as error:
        # Some templates put the arguments of tool calls into strings instead of writing them as JSON.
        texts = _with_text_arguments(messages)
        if texts is None:
            raise _refusal(error) from None
        try:
            return _render_once(template, texts, variables)
        except Exception:
            raise _refusal(error) from None
    except Exception as error:
        raise _refusal(error) from None


def _render_once(template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    return template.compiled.render(messages=messages, **variables)


def _refusal(error: Exception) -> ParameterError:
    """A template's own ``raise_exception``, or its failure on messages that it was not made for."""
    own = type(error) is jinja2.TemplateError
    return ParameterError("messages", str(error) if own else f"the chat template failed: {str(error)[:500]}")


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """A copy with the arguments of tool calls as JSON text; None if there are no tool calls."""
    result = copy.deepcopy(messages)
    functions = [call["function"] for message in result for call in message.get("tool_calls", ())]
    for function in functions:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return result if functions else None


def _tag_final(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text (changed in place) and return that text."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + _TAG
        return content
    if not content:
        raise ParameterError("continue_final_message", "the last message has no text to continue")
    text = content[-1]["text"]
    content[-1]["text"] = text + _TAG
    return text


def _cut_at_tag(text: str, final: str) -> str:
    at = text.rfind(_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise ParameterError("continue_final_message", "the chat template does not show the last message as it is")
    # A template that trims the message has removed the tag's space, too.
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
