"""Tests tools and the calls of tools, as OpenAI stores them and as templates read them.

The texts that the templates print are written by hand.
"""

import json

import pytest

from jaxlora.errors import DataError
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import TALK, talk, text_of

# The ways in which templates print the arguments of a call. DeepSeek's have the first,
# Llama's and Qwen2.5's `tojson`, Qwen3's `either`, and Gemma's `items`.
PRINTING = {
    "joined": "{{ '<' + f.arguments + '>' }}",
    "text": "<{{ f.arguments }}>",
    "tilde": "{{ '<' ~ f.arguments ~ '>' }}",
    "tojson": "<{{ f.arguments | tojson }}>",
    "either": "<{{ f.arguments if f.arguments is string else f.arguments | tojson }}>",
    "items": '<{"city": "{% for k, v in f.arguments.items() %}{{ v }}{% endfor %}"}>',
    "mapping": "<{% if f.arguments is mapping %}{{ f.arguments | tojson }}{% endif %}>",
}


@pytest.mark.parametrize("form", ["object", "text", "calls", "flat"])
@pytest.mark.parametrize("printing", PRINTING)
def test_arguments_are_printed_as_json(run, make_tokenizer, printing, form):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}{{ f.name }}"
        f"{PRINTING[printing]}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    arguments: object = {"city": "Rom\u00e9"}
    if form != "object":
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": "f", "arguments": arguments}
    calls: object = [function if form == "flat" else {"function": function}]
    answer = {"role": "assistant", "tool_calls": calls}
    if form == "calls":
        answer["tool_calls"] = json.dumps(calls)
    tokenizer = make_tokenizer(template)
    wanted = 'user:Hiassistant:f<{"city": "Rom\u00e9"}>'
    user = {"role": "user", "content": "Hi"}
    assert text_of(run, tokenizer, talk(user, answer), append_eos=False) == wanted
    if form != "calls":
        given = [user, {"content": "", **answer}]
        assert tokenizer.chat.render(given) == wanted


def test_parameters_of_tools_may_be_text(run, make_tokenizer):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    text = json.dumps(parameters)
    for tool in ({"name": "f", "parameters": text}, {"parameters": text, "name": "f"}):
        tools = [{"type": "function", "function": tool}, tool]
        shown = text_of(
            run, make_tokenizer(chat_templates.QWEN3), talk(*TALK) | {"tools": tools}
        )
        assert shown.count(f'"parameters": {text}') == 2


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "now("}}]},
            r"the arguments of messages\[1\]\.tool_calls\[0\] are 'now\(', not an obj",
        ),
        (
            {"tool_calls": [{"name": "f", "arguments": "[1]"}]},
            r"are '\[1\]', not an object\. Write an object, such as",
        ),
        ({"tool_calls": [{"type": "function"}]}, r"tool_calls\[0\] is .*, not the cal"),
        ({"tool_calls": "f()"}, r"tool_calls is 'f\(\)', not a list of calls"),
        ({"tool_calls": "[]"}, "is an empty answer"),
        (
            {"content": "x", "function_call": {"name": "f", "arguments": "{}"}},
            r"messages\[1\] has function_call, which OpenAI has replaced by tool_calls",
        ),
        ({"value": "x"}, r"messages\[1\] has no content \(keys: role, value\)\. Write"),
        ({"content": None}, r"messages\[1\] has no content \(keys: role\)"),
        (
            {"content": 3},
            r"content is 3, of type int, not a string\. Store it as text\.",
        ),
    ],
)
def test_bad_calls_and_contents(run, make_tokenizer, message, match):
    with pytest.raises(DataError, match=match):
        run(
            [talk(TALK[0], {"role": "assistant", **message})],
            make_tokenizer(chat_templates.QWEN3),
        )
