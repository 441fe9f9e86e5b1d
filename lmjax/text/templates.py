"""Chat templates as compiled jinja, in the dialect of Hugging Face's tokenizers.

A template comes with a model or with a request and is untrusted code: it runs in jinja's immutable sandbox and sees
plain JSON values only. jinja2 before 3.1.6 has known ways out of that sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmjax.text.errors import TokenizerError


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's words for training: here its body is output as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):  # type: ignore[name-defined]
    """jinja's namespace without attributes that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        for name in dict(*args, **kwargs):
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, *args, **kwargs)  # type: ignore[attr-defined]

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


class _Dict:
    """``dict(...)`` for templates, without the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class ChatTemplate:
    """A compiled template. Raises ``jinja2.TemplateSyntaxError`` when made from a wrong one.

    ``takes_parts``: it loops over a message's content, so lists of parts may be given to it.
    ``takes_strings``: it can also be given a plain string (a template that loops over the content and never tests
    for a string would loop over its characters).
    """

    def __init__(self, source: str):
        environment = _environment()
        self.source = source
        self.compiled = environment.from_string(source)
        tree = environment.parse(source)
        self.takes_parts = _loops_over_content(tree)
        self.takes_strings = not self.takes_parts or any(
            test.name in ("string", "iterable", "sequence", "mapping") for test in tree.find_all(nodes.Test)
        )


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def why_invalid(source: str) -> str | None:
    """``not valid jinja: ...`` if it does not compile. Python's compiler refuses some (``break`` outside a loop)."""
    try:
        compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        return f"not valid jinja: line {error.lineno}: {error.message}"
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        return f"not valid jinja: {error}"
    return None


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a loop runs over some message's content, directly or through a variable set from it."""
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set()):
            names.add(assign.target.name)
    for macro in tree.find_all(nodes.Macro):
        names |= {arg.name for arg in macro.args if "content" in arg.name}
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):
        # length, trim and the like give no list of parts
        return node.name in ("list", "selectattr", "rejectattr") and _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def read_template(value: str) -> str:
    """A template given by the operator: the path of a jinja file, or the template itself. Raises ``TokenizerError``."""
    name = "the chat template"
    if not any(mark in value for mark in ("{", "\n")):
        name = f"the chat template {value!r}"
        try:
            value = Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{name} cannot be read: {error}") from None
    if reason := why_invalid(value):
        raise TokenizerError(f"{name} is {reason}")
    return value
