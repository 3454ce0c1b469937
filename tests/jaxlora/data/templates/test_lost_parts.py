"""Tests that no call of a tool, nor what belongs to it, is lost without a word."""

import dataclasses
import json

import pytest

from jaxlora.data.formats.example import Rendered
from jaxlora.data.records.messages import read_messages
from jaxlora.data.records.tool_calls import read_tools
from jaxlora.errors import DataError
from jaxlora.generate.prompt import Prompt
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import model_chat

ARGUMENTS = {"city": 'Rom\u00e9 "x" <b>', "days": 3, "where": {"at": [1.5, True, None]}}
USER = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "content": "22 degrees"}
ANSWER = {"role": "assistant", "content": "It is 22."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
START = "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}"
END = "<end>{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"


def calling(content, *calls):
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def call(name="weather", **arguments):
    return {"name": name, "arguments": arguments}


def render(template, *messages, tools=None):
    conversation = read_messages(list(messages), "m", is_columnar=False)
    tools = read_tools(tools, "tools", is_columnar=False)
    conversation = dataclasses.replace(conversation, tools=tools)
    (chat,) = model_chat(template).render_all([conversation], "completion")
    if isinstance(chat, DataError):
        raise chat
    assert isinstance(chat, Rendered)
    return [chat.text[start:end] for start, end in chat.target_spans]


# --- Messages without text -------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_a_call_without_text_is_printed_where_the_content_must_be_none(content):
    message = calling(content, call(city="Rome"))
    if content == "absent":
        del message["content"]
    called, said = render(chat_templates.R1_TOOLS, USER, message, RESULT, ANSWER)
    assert called == '<|call|>function<|sep|>weather\n{"city": "Rome"}<|end|></s>'
    assert said == "It is 22.</s>"


@pytest.mark.parametrize("value", ["one", "list", "parameters"])
def test_calls_of_sharegpt_are_printed_where_the_content_must_be_none(value):
    one = call(city="Rome")
    if value == "parameters":
        one = {"name": "weather", "parameters": {"city": "Rome"}}
        with pytest.raises(DataError, match=r"has 'parameters', and chat templates"):
            speak(json.dumps(one))
        return
    (called,) = speak(json.dumps([one, one] if value == "list" else one))
    assert called.count('weather\n{"city": "Rome"}') == (2 if value == "list" else 1)


def speak(value):
    asked = {"from": "human", "value": "Weather?"}
    said = {"from": "function_call", "value": value}
    return render(chat_templates.R1_TOOLS, asked, said)


@pytest.mark.parametrize(
    "printed",
    [
        "{{ m.content }}",
        "{{ '' + m.content }}",
        "{{ '' ~ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.content.split('</think>')[-1] }}",
        "{{ 'thought' if '</think>' in m.content }}",
        "{{ m.content[0] if m.content | length }}",
        "{{ m.content if m.content is string }}",
        "{{ m.content if m.content is not none }}",
        "{{ m.content if m.content != none and m.content != '' }}",
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
        "{{ m.content | tojson if m.content is iterable }}",
        "{{ {'role': 'x', 'content': m.content} | tojson | length - 30 or '' }}",
        "{{ (messages[1:2] | tojson).count('\"content\": null') - 1 or '' }}",
    ],
)
def test_an_absent_text_suits_every_template(printed):
    asked = "{% if m.role == 'user' %}{{ m.content }}{% else %}"
    printed += f"{EACH}{{{{ f | tojson }}}}{{% endfor %}}"
    template = f"{START}{asked}{printed}{{% endif %}}{END}"
    (called,) = render(template, USER, calling(None, call(city="Rome")))
    assert called == '{"name": "weather", "arguments": {"city": "Rome"}}<end>'


def test_an_empty_list_of_calls_does_not_hide_the_text():
    template = f"{START}{{{{ 'calls' if 'tool_calls' in m else m.content }}}}{END}"
    assert render(template, USER, ANSWER | {"tool_calls": []}) == ["It is 22.<end>"]


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_absent_arguments_are_an_empty_object(arguments):
    message = calling(None, {"name": "now", "arguments": arguments})
    (called,) = render(chat_templates.LLAMA3, USER, message)
    assert called == '{"name": "now", "arguments": {}}<|eot_id|>'


# --- Forms in which templates print calls -------------------------------------------

FORMS = {
    "tojson": "{{ f | tojson }}",
    "indented": "{{ f | tojson(indent=2) }}",
    "ascii": "{{ f | tojson(ensure_ascii=true, sort_keys=true) }}",
    "tight": "{{ f.name }}{{ f.arguments | tojson(separators=(',', ':')) }}",
    "text": "{{ f.name + f.arguments }}",
    "python": "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v }},"
    "{% endfor %})",
    "xml": "<function={{ f.name }}>{% for k in f.arguments %}<{{ k }}>"
    "{{ f.arguments[k] if f.arguments[k] is string else f.arguments[k] | tojson }}"
    "</{{ k }}>{% endfor %}",
    "escaped": "{{ f.name | e }}{{ f.arguments | tojson | e }}",
    "by name": "{{ {'weather': 'W'}[f.name] }}:weather{{ f.arguments | tojson }}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("content", [None, "Let me see."])
def test_calls_in_any_form_are_accepted(form, content):
    template = f"{START}{{{{ m.content or '' }}}}{EACH}{FORMS[form]}{{% endfor %}}{END}"
    message = calling(content, call(**ARGUMENTS), call(day=1))
    answers = render(template, USER, message, RESULT, ANSWER)
    assert "weather" in answers[0] and answers[0].startswith(content or "")


# --- What is lost --------------------------------------------------------------------

NAME = r"the name of the call of 'weather' in message 1 \(assistant\)"
TEXT = r"the text 'Let me see\.' beside the calls of message 1 \(assistant\)"
CALL = "{{ f | tojson }}"


@pytest.mark.parametrize(
    ("printed", "content", "match"),
    [
        ("{{ m.content }}", None, NAME),
        ("{{ m.content }}", "Let me see.", NAME),
        (f"{{% if not m.content %}}{EACH}{CALL}{{% endfor %}}", "Let me see.", NAME),
        (f"{EACH}{CALL}{{% endfor %}}", "Let me see.", TEXT),
        (f"{EACH}{{{{ f.name }}}}{{% endfor %}}", None, "the argument 'city' of the"),
        (f"{EACH}{{{{ f.arguments }}}}{{% endfor %}}", None, NAME),
        (
            f"{EACH}{{{{ f.name | upper }}}}{{{{ f.arguments }}}}{{% endfor %}}",
            None,
            NAME,
        ),
        (
            "{{ m.tool_calls[0].function | tojson if m.tool_calls }}",
            None,
            "of 'news' in",
        ),
        ("{{ m.tool_calls[-1].function | tojson if m.tool_calls }}", None, NAME),
        (
            f"{EACH}{{{{ f.name }}}}{{{{ f.arguments.city }}}}{{% endfor %}}",
            None,
            "the argument 'days' of the call of 'weather'",
        ),
        (
            f"{EACH}{{{{ (f | tojson)[:40] }}}}{{% endfor %}}",
            None,
            "the argument '.*' of the call of 'weather'",
        ),
        (
            f"{EACH}{{{{ f.name }}}}{{% for k, v in f.arguments.items() %}}"
            "{{ v if v is not mapping else '...' }}{% endfor %}{% endfor %}",
            None,
            "the argument 'where' of the call of 'weather'",
        ),
    ],
)
def test_what_is_lost_is_named(printed, content, match):
    if "if not m.content" in printed:
        printed += "{% endif %}"
    shown = "{{ m.content if m.role != 'assistant' or not m.tool_calls }}"
    template = f"{START}{shown}{printed}{END}"
    message = calling(content, call(**ARGUMENTS), call("news", topic="sun"))
    with pytest.raises(DataError, match=f"chat template does not print .*{match}"):
        render(template, USER, message, RESULT, ANSWER)


def test_a_name_in_the_result_does_not_stand_for_the_call():
    template = (
        f"{START}{{{{ m.content or '' }}}}{{% if m.role == 'tool' %}}{{% for c in "
        "messages[loop.index0 - 1].tool_calls %}{{ c.function | tojson }}{% endfor %}"
        f"{{% endif %}}{END}"
    )
    with pytest.raises(DataError, match=NAME):
        render(template, USER, calling(None, call(city="x")), RESULT, ANSWER)


def test_a_lost_result_is_named():
    template = (
        f"{START}{{% if m.role != 'tool' %}}"
        f"{{{{ m.content or m.tool_calls | tojson }}}}{{% endif %}}{END}"
    )
    match = r"does not print the content '22 degrees' of message 2 \(tool\)\. Use a tem"
    with pytest.raises(DataError, match=match):
        render(template, USER, calling(None, call(city="x")), RESULT, ANSWER)


def test_a_result_within_the_turn_of_a_call_is_not_trained_on():
    template = (
        "{% for m in messages if m.role != 'tool' %}{{ '<' ~ m.role ~ '>' }}"
        "{{ m.content or m.tool_calls | tojson }}"
        f"{{{{ messages[2].content if m.tool_calls }}}}{END}"
    )
    talk = USER, calling(None, call(city="x")), RESULT, ANSWER
    match = r"turn of message 1 is unclear: the template prints the content '22 degrees"
    with pytest.raises(DataError, match=match):
        render(template, *talk)
    talk = USER, calling(None, call(city="x")) | {"weight": 0}, RESULT, ANSWER
    conversation = read_messages(list(talk), "m", is_columnar=False)
    chats = model_chat(template).render_all([conversation], "completion")
    assert isinstance(chats[0], Rendered)
    (chat,) = model_chat(template).render_all([conversation], "all")
    assert isinstance(chat, Rendered)


def test_lost_tools_are_named():
    template = (
        "{% if tools and messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}"
    )
    template += f"{START}{{{{ m.content }}}}{END}"
    with pytest.raises(DataError, match="does not print the tool 'weather'"):
        render(template, USER, ANSWER, tools=TOOLS)
    system = {"role": "system", "content": "Be brief."}
    assert render(template, system, USER, ANSWER, tools=TOOLS)
    as_texts = [json.dumps(tool) for tool in TOOLS]
    assert render(template, system, USER, ANSWER, tools=as_texts)
    with pytest.raises(DataError, match=r"tools\[0\] is 'weather', not a tool"):
        render(template, system, USER, ANSWER, tools=["weather"])


def test_thoughts_beside_a_call_that_is_not_trained_on_may_be_left_out():
    thought = "<think>\nhm\n</think>\n\nLet me see."
    called = calling(thought, call(city="x"))
    talk = RESULT, ANSWER, USER, ANSWER
    match = "print the text 'hm' beside .* of message 1 .*, which is trained on"
    with pytest.raises(DataError, match=match):
        render(chat_templates.QWEN3, USER, called, *talk)
    assert len(render(chat_templates.QWEN3, USER, called | {"weight": 0}, *talk)) == 2


# --- Policies, and prompts -----------------------------------------------------------


def test_records_with_lost_calls_are_dropped_and_counted(run, make_tokenizer):
    good = {"messages": [USER, calling(None, call(city="Rome")), RESULT, ANSWER]}
    bad = {"messages": [USER, calling("See.", call(city="Rome")), RESULT, ANSWER]}
    tokenizer = make_tokenizer(chat_templates.R1_TOOLS)
    with pytest.raises(DataError, match=r"record 2: the chat template does not print"):
        run([good, bad], tokenizer)
    result = run([good, bad, good], tokenizer, data={"bad_records": "drop"})
    assert (len(result.samples), result.num_bad) == (2, 1)
    with pytest.raises(DataError, match="does not print"):
        run([bad], tokenizer, data={"loss_on": "all"})


def test_a_prompt_with_a_lost_call_is_refused():
    chat = model_chat(chat_templates.R1_TOOLS)
    prompt = Prompt([USER, calling(None, call(city="Rome")), RESULT])
    text = chat.render([dict(m) for m in prompt.text], add_generation_prompt=True)
    assert 'weather\n{"city": "Rome"}' in text
    assert Prompt(prompt.text) == prompt
    prompt = Prompt([USER, calling("See.", call(city="Rome")), RESULT])
    with pytest.raises(DataError, match="does not print the name of the call"):
        chat.render([dict(m) for m in prompt.text], add_generation_prompt=True)
