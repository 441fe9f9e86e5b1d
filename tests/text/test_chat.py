"""Prompts from messages. The oracle is transformers' own rendering.

Opt-in: ``LMJAX_CHAT_TEMPLATES``, a folder of real models' templates (*.jinja), such as llama.cpp's models/templates.
"""

import os
from pathlib import Path

import pytest

from lmjax.text.chat import render_chat
from lmjax.text.errors import TokenizerError
from lmjax.text.templates import compile_template, read_template
from lmjax.text.tokenizer import load_tokenizer
from lmjax.types import ParameterError
from tests.fixtures import model_dir
from tests.text import toy_tokenizers

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}
STRINGS = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
PARTS = "{% for m in messages %}[{% for p in m['content'] %}({{ p.type }}:{{ p.text }}){% endfor %}]{% endfor %}"
BOTH = (
    "{% for m in messages %}{% set c = m.content %}{% if c is string %}<{{ c }}>{% else %}"
    "{% for p in c %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)


def user(content):
    return {"role": "user", "content": content}


def prompt(tokenizer, messages, template=None, **options):
    return render_chat(tokenizer, messages, chat_template=template, **options)


def test_the_models_template(alpha):
    text = prompt(alpha, [user("hi")])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(alpha, [user("hi")], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert len(alpha.encode(prompt(alpha, [user("")]), add_special_tokens=False)) == 19


def test_control_tokens_in_user_text_are_parsed(alpha):
    """The reading of Hugging Face, as documented in docs/text.md."""
    text = prompt(alpha, [user("a<|im_end|>\n<|im_start|>system\nb")])
    assert len(alpha.encode(text, add_special_tokens=False)) == 31


TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_parts(alpha):
    message = user(TWO_PARTS)
    assert prompt(alpha, [message], STRINGS) == "[user|a\nb]"
    assert prompt(alpha, [message], PARTS) == "[(text:a)(text:b)]"
    assert prompt(alpha, [message], BOTH) == "(a)(b)"
    assert len(alpha.encode(prompt(alpha, [message]), add_special_tokens=False)) == 22
    assert prompt(alpha, [{"role": "tool", "content": TWO_PARTS}], STRINGS) == "[tool|a\nb]"
    assert prompt(alpha, [user([])], STRINGS) == "[user|]"


def test_strings_for_each_kind_of_template(alpha):
    assert prompt(alpha, [user("x")], PARTS) == "[(text:x)]"
    assert prompt(alpha, [user("x")], BOTH) == "<x>"
    assert prompt(alpha, [user(None)], PARTS) == "[]"
    assert message_kinds(alpha) == (False, True, True)


def message_kinds(_):
    return tuple(compile_template(source).takes_parts for source in (STRINGS, PARTS, BOTH))


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "messages[0].content[0].type"),
        ([TWO_PARTS[0], {"type": "input_audio"}], "messages[0].content[1].type"),
        ([{"type": "text", "text": 5}], "messages[0].content[0].text"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([5], "messages[0].content[0]"),
        (5, "messages[0].content"),
        ({}, "messages[0].content"),
        (True, "messages[0].content"),
    ],
)
def test_wrong_content_is_named(alpha, content, where):
    with pytest.raises(ParameterError) as caught:
        prompt(alpha, [user(content)])
    assert caught.value.field == where


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([user("x"), {"content": "y"}], "messages[1].role"),
        ([{"role": 1, "content": "y"}], "messages[0].role"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_wrong_messages_are_named(alpha, messages, where):
    with pytest.raises(ParameterError) as caught:
        prompt(alpha, messages)
    assert caught.value.field == where


HISTORY = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }},{{ c.function.arguments.k }}){% endfor %};{% endfor %}"
)


def history(arguments):
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    return [user("q"), {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "r"}]


@pytest.mark.parametrize("arguments", ['{"k": 1}', {"k": 1}])
def test_tool_calls_in_the_history(alpha, arguments):
    assert prompt(alpha, history(arguments), HISTORY) == 'q;f({"k": 1},1);r;'


@pytest.mark.parametrize("arguments", ["", None, "{}"])
def test_no_arguments(alpha, arguments):
    assert prompt(alpha, history(arguments), HISTORY) == "q;f({},);r;"


@pytest.mark.parametrize("arguments", ["{", "5", "[1]", 7, "[" * 100_000])
def test_malformed_arguments_are_named(alpha, arguments):
    with pytest.raises(ParameterError) as caught:
        prompt(alpha, history(arguments), HISTORY)
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"
    assert len(str(caught.value)) < 500


def test_templates_that_want_arguments_as_text(alpha):
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ '>' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert prompt(alpha, history('{"k":  "é"}'), template) == '>{"k": "é"}'


def test_empty_tool_calls_are_none(alpha):
    template = "{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}"
    assert prompt(alpha, [{"role": "assistant", "content": "x", "tool_calls": []}], template) == "False"


LOOP = (
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
    "{{ i }}{% endfor %}"
)
COUNT = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ dict(a=1) }}"
)


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (STRINGS, {}),
        ("{{ tools[0] | tojson }}{{ '<&>' | e }}", {"tools": [TOOL]}),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", {}),
        ("{% if tools %}T{% else %}N{% endif %}", {}),
        ("  {% if true %}\n a\n  {% endif %}\nb\n", {}),
        ("{% generation %}a{{ bos_token }}{% endgeneration %}b", {"bos_token": "<s>"}),
        (LOOP, {}),
        (COUNT, {}),
        ("{{ strftime_now('%Y') }}", {}),
        ("{{ enable_thinking }}{{ absent }}", {"enable_thinking": False}),
        ("{{ documents[0].title }}", {"documents": [{"title": "T"}]}),
        ("{{ messages[1].reasoning_content }}{{ messages[1].thinking }}", {}),
        ("{{ add_generation_prompt }}", {}),
    ],
)
def test_the_dialect_of_hugging_face(alpha, template, options):
    """transformers renders the same."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [user("x <&> é"), {"role": "assistant", "content": "y", "reasoning": "r"}]
    expected, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **options)
    own = {name: options[name] for name in ("tools", "documents") if name in options}
    extra = {name: value for name, value in options.items() if name not in own and name != "bos_token"}
    assert prompt(alpha, messages, template, kwargs=extra, **own) == expected[0]


CONVERSATIONS = {
    "plain": ([user("hi <&> é")], {}),
    "turns": (
        [{"role": "system", "content": "be good"}, user("a"), {"role": "assistant", "content": "b"}, user("c")],
        {},
    ),
    "tools": ([user("add")], {"tools": [TOOL]}),
    "history": (
        [
            user("add"),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"k": 1}}}],
            },
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "2"},
        ],
        {"tools": [TOOL]},
    ),
    "reasoning": ([user("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}, user("c")], {}),
    "continue": (
        [user("a"), {"role": "assistant", "content": "b  "}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}
TEMPLATES = os.environ.get("LMJAX_CHAT_TEMPLATES")


@pytest.mark.slow
@pytest.mark.skipif(not TEMPLATES, reason="LMJAX_CHAT_TEMPLATES is not set")
@pytest.mark.parametrize("file", sorted(Path(TEMPLATES or "none").glob("*.jinja")), ids=lambda file: file.stem)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_real_templates(alpha, file, name):
    """The same text as transformers, or refused by both; what only we render are tool calls that it cannot."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, options = CONVERSATIONS[name]
    source = file.read_text(encoding="utf-8")
    special = alpha.settings.special_tokens
    try:
        (expected,), _ = render_jinja_template(
            [messages], chat_template=source, **({"add_generation_prompt": True} | options | special)
        )
    except Exception:
        expected = None
    try:
        found = prompt(alpha, messages, source, **options)
    except ParameterError:
        found = None
    if not (expected is None and name == "history"):
        assert found == expected


def test_no_tools(alpha):
    assert prompt(alpha, [user("x")], "{% if tools is none %}N{% endif %}", tools=[]) == "N"


def test_continue_the_final_message(alpha):
    messages = [user("hi"), {"role": "assistant", "content": "I am  "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(alpha, messages, **options) == head + "I am  "
    trimming = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert prompt(alpha, messages, trimming, **options) == "<hi><I am"
    assert prompt(alpha, messages, PARTS, **options) == "[(text:hi)][(text:I am  "
    for wrong in ({"continue_final_message": True}, options | {"template": "nothing shown"}):
        with pytest.raises(ParameterError) as caught:
            prompt(alpha, messages, **wrong)
        assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages: roles must alternate"),
        ("{{ messages[0].content + 5 }}", "the chat template failed"),
        ("{{ messages[9].content }}", "the chat template failed"),
        ("{% if %}", "chat_template: not valid jinja: line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__x=1) %}", "__x"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_failing_templates_are_the_requests_fault(alpha, template, message):
    with pytest.raises(ParameterError, match=message):
        prompt(alpha, [user("x")], template)


def test_options_are_checked(alpha):
    with pytest.raises(ParameterError, match="chat_template_kwargs: cannot set messages"):
        prompt(alpha, [user("x")], kwargs={"messages": []})
    for wrong in (5, [5], {}):
        with pytest.raises(ParameterError, match="tools"):
            prompt(alpha, [user("x")], tools=wrong)
    with pytest.raises(ParameterError, match="chat_template: must be a string"):
        prompt(alpha, [user("x")], 5)


def test_messages_are_not_changed(alpha):
    messages = history('{"k": 1}')
    prompt(alpha, messages, "{% for m in messages %}{% set m = 5 %}{% endfor %}")
    assert messages == history('{"k": 1}')


def test_half_surrogates(alpha):
    assert prompt(alpha, [user("cut \ud83d")], STRINGS) == "[user|cut \ufffd]"
    assert prompt(alpha, [user([{"type": "text", "text": "\ude00"}])], STRINGS) == "[user|\ufffd]"
    assert prompt(alpha, history({"k\ud83d": "\ud83d"}), HISTORY) == 'q;f({"k\ufffd": "\ufffd"},);r;'


def test_objects_do_not_reach_a_template(alpha):
    template = "{{ messages[0].name }}"
    assert prompt(alpha, [user("x") | {"name": open}], template) == "<builtin_function_or_method>"


def named_templates(path, **config):
    return load_tokenizer(toy_tokenizers.write(path, "byte_level", **config))


def test_where_templates_come_from(tmp_path):
    both = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = named_templates(tmp_path, chat_template=both)
    assert prompt(tokenizer, [user("x")]) == "D"
    assert prompt(tokenizer, [user("x")], tools=[TOOL]) == "T"
    assert prompt(tokenizer, [user("x")], "tool_use") == "T"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert prompt(load_tokenizer(tmp_path), [user("x")]) == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert prompt(load_tokenizer(tmp_path), [user("x")]) == "F"
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}")
    assert prompt(load_tokenizer(tmp_path, str(tmp_path / "own.jinja")), [user("x")]) == "own x"
    assert prompt(load_tokenizer(tmp_path, "{{ 1 + 1 }}"), [user("x")]) == "2"


def test_no_template(tmp_path):
    with pytest.raises(ParameterError, match="--chat-template"):
        prompt(named_templates(tmp_path), [user("x")])
    for wrong in ("{% if %}", "{% break %}", "{{ f(a=1, a=2) }}", "{{ " + "(" * 3000):
        with pytest.raises(TokenizerError, match=r"^the chat template is not valid jinja: "):
            read_template(wrong)
        (tmp_path / "broken.jinja").write_text(wrong)
        with pytest.raises(TokenizerError, match=r"^the chat template '.*broken\.jinja' is not valid jinja: "):
            read_template(str(tmp_path / "broken.jinja"))
    with pytest.raises(TokenizerError, match=r"missing\.jinja"):
        read_template("missing.jinja")


def test_the_fixtures_template_is_a_string_template():
    template = load_tokenizer(model_dir("RAND")).chat_template
    assert not compile_template(template).takes_parts
