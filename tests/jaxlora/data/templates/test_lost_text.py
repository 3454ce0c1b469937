"""Tests that no text of a message is lost without a word, for templates of many kinds.

The templates are short. They leave out what those of the families do that they name.
"""

import importlib.util
import pathlib
import re

import pytest

from jaxlora.data.formats.example import Rendered
from jaxlora.data.records.messages import read_messages, without_earlier_answers
from jaxlora.errors import DataError
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import model_chat

LOOP = "{% for m in messages %}"
ASKED = "{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
TURN = "{{ '<' ~ m.role ~ '>' ~ m.content ~ '<end>' }}"
CALLS = "{{ m.tool_calls | tojson if m.tool_calls }}"
CUT = "{{ '<' ~ m.role ~ '>' ~ m.content.split('</think>')[-1] ~ '<end>' }}"


def only(*roles, turn=TURN):
    return f"{LOOP}{{% if m.role in {list(roles)} %}}{turn}{CALLS}{{% endif %}}{ASKED}"


TEMPLATES = {
    "chatml": chat_templates.CHATML,
    "smollm2": chat_templates.SMOLLM2,
    "llama3": chat_templates.LLAMA3,
    "mistral": chat_templates.MISTRAL,
    "gemma": chat_templates.GEMMA,
    "phi3": chat_templates.PHI3,
    "r1": chat_templates.R1,
    "r1 with tools": chat_templates.R1_TOOLS,
    "qwen3": chat_templates.QWEN3,
    "marked": chat_templates.GENERATION,
    "merging": chat_templates.MERGING,
    "separated": chat_templates.SEPARATED,
    "reasoning": chat_templates.REASONING,
    # Other roles than these are ignored: Qwen2.5, GLM.
    "qwen2.5": "{% if messages[0].role != 'system' %}{{ '<system>You are Q.' }}"
    "{% endif %}" + only("system", "user", "assistant", "tool"),
    "users": only("user", "assistant"),
    # The last system message is printed first: DeepSeek-V3.
    "deepseek-v3": "{% set ns = namespace(s='') %}{% for m in messages if m.role == "
    "'system' %}{% set ns.s = m.content %}{% endfor %}{{ ns.s }}"
    + only("user", "assistant", turn=CUT),
    # The first message is the developer's if it is not a user's: gpt-oss.
    "gpt-oss": "{% set first = messages[0].role in ('system', 'developer') %}"
    "{{ '<dev>' ~ messages[0].content if first }}{% for m in messages[first | int:] "
    "%}{% if m.role == 'assistant' %}{{ '<think>' ~ m.thinking if loop.last and "
    "m.thinking }}{% endif %}{{ '<' ~ m.role ~ '>' ~ m.content if m.role in ('user', "
    "'assistant') }}{{ '<end>' }}" + ASKED,
    # Thoughts of a key, in the last turn or where the user wants them: Qwen3.6, GLM.
    "preserving": "{# No thinking key. #}"
    + LOOP
    + "{{ '<' ~ m.role ~ '>' }}{% if m.role == 'assistant' and "
    "(loop.last or preserve_thinking) %}{{ '<think>' ~ (m.reasoning_content or '') ~ "
    "'</think>' }}{% endif %}{{ m.content ~ '<end>' }}" + CALLS + ASKED,
    # Only the last messages fit.
    "window": "{% for m in messages[-2:] %}" + TURN + ASKED,
    # A text is cut, or printed in another form.
    "short": LOOP + "{{ '<' ~ m.role ~ '>' ~ m.content[:6] ~ '<end>' }}" + ASKED,
    "json": LOOP + "{{ '<' ~ m.role ~ '>' ~ m.content | tojson ~ '<end>' }}" + ASKED,
}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def thought(before, after):
    return f"<think>\n{before}\n</think>\n\n{after}"


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "CALL1"}}}
USER, ANSWER = say("user", "USER1"), say("assistant", "ANSWER1")
LATER = [say("user", "USER2"), say("assistant", "ANSWER2")]
THOUGHTFUL = say("assistant", thought("THOUGHT1", "ANSWER1"))
TALKS = {
    "turns": [USER, ANSWER, *LATER],
    "long text": [USER, say("assistant", "ANSWER1 is long.\nMORE1 is below.")],
    "system": [say("system", "SYSTEM1"), USER, ANSWER],
    "two systems": [say("system", "SYSTEM1"), say("system", "SYSTEM2"), USER, ANSWER],
    "system later": [USER, ANSWER, say("system", "SYSTEM1"), *LATER],
    "developer": [say("developer", "DEVELOPER1"), USER, ANSWER],
    "developer later": [USER, ANSWER, say("developer", "DEVELOPER1"), *LATER],
    "both": [say("system", "SYSTEM1"), say("developer", "DEVELOPER1"), USER, ANSWER],
    "a thought": [USER, THOUGHTFUL],
    "thoughts": [
        *(USER, THOUGHTFUL, LATER[0]),
        say("assistant", thought("THOUGHT2", "ANSWER2")),
    ],
    "only the end of a thought": [USER, say("assistant", "THOUGHT1</think>ANSWER1")],
    "keys": [
        *(USER, ANSWER | {"reasoning_content": "THOUGHT1"}, LATER[0]),
        LATER[1] | {"reasoning_content": "THOUGHT2"},
    ],
    "a key twice": [
        *(USER, ANSWER | {"reasoning_content": "THOUGHT1", "thinking": "THOUGHT1"}),
    ],
    "another key": [USER, ANSWER | {"thinking": "THOUGHT1"}],
    "function": [USER, ANSWER, say("function", "RESULT1"), *LATER],
    "tools": [
        *(USER, say("assistant", None, tool_calls=[CALL]), say("tool", "RESULT1")),
        *(ANSWER, *LATER),
    ],
    "text and tools": [
        *(USER, say("assistant", thought("THOUGHT1", "SAID1"), tool_calls=[CALL])),
        *(say("tool", "RESULT1"), ANSWER, *LATER),
    ],
    "an empty answer": [USER, say("assistant", "", weight=0), *LATER],
    "answers in a row": [USER, ANSWER, say("assistant", "ANSWER2")],
    "muted": [USER, THOUGHTFUL | {"weight": 0}, *LATER],
    "the same text": [say("developer", "USER1"), USER, ANSWER],
}
MARK = re.compile(r"[A-Z]+[12]")
KEYS = ("reasoning_content", "thinking")


def conversation(talk, loss_on="completion"):
    read = read_messages(talk, "m", is_columnar=False)
    return without_earlier_answers(read) if loss_on == "last" else read


def check(chat, loss_on):
    """Checks that each mark is printed, or the record is bad or counted."""
    talks = [conversation(talk, loss_on) for talk in TALKS.values()]
    rendered = chat.render_all(talks, loss_on)
    for name, talk, one in zip(TALKS, talks, rendered, strict=True):
        if isinstance(one, DataError):
            continue
        text = one.text
        for i, message in enumerate(talk.messages):
            # The log names keys that a template never reads.
            seen = {
                k: v for k, v in message.items() if k not in KEYS or chat.mentions(k)
            }
            lost = set(MARK.findall(str(seen))) - set(MARK.findall(text))
            is_counted = not talk.weights[i] and one.num_cut
            assert not lost or (is_counted and lost == {"THOUGHT1"}), (name, text)
        if name == "the same text":
            assert text.count("USER1") == 2, text
    return dict(zip(TALKS, rendered, strict=True))


@pytest.mark.parametrize("loss_on", ["completion", "last"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost_in_silence(name, loss_on):
    found = check(model_chat(TEMPLATES[name]), loss_on)
    is_refused = name in ("window", "short")
    assert isinstance(found["turns"], DataError if is_refused else Rendered)


@pytest.mark.parametrize(
    ("name", "talk", "match"),
    [
        (
            "qwen2.5",
            "developer",
            r"'DEVELOPER1' of message 0 \(developer\)\. Set data\.roles to \{deve",
        ),
        ("qwen2.5", "the same text", r"the text 'USER1' of message 0 \(developer\)"),
        ("deepseek-v3", "two systems", r"'SYSTEM1' of message 0 \(system\)\. Give th"),
        ("gpt-oss", "developer later", r"'DEVELOPER1' of .*\(developer\)\. Give the t"),
        ("qwen2.5", "function", r"'RESULT1' of .* Set data\.roles to \{function: tool"),
        ("preserving", "another key", r"Rename the key 'thinking' .* 'reasoning_conte"),
        ("gpt-oss", "both", r"the text 'DEVELOPER1' of message 1 \(developer\)"),
        ("r1", "a thought", r"'THOUGHT1' of message 1 \(assistant\), which is trained"),
        (
            "r1",
            "only the end of a thought",
            "'THOUGHT1' .* Set data.chat_template to a.* weight 0; or remove",
        ),
        (
            "qwen3",
            "thoughts",
            r"trl/chat_templates: qwen3_training\.jinja, .* \(data\.lo",
        ),
        ("preserving", "keys", r"Set data\.chat_template_kwargs to \{preserve_thinkin"),
        ("short", "long text", "'ANSWER1 is long.' of message 1"),
        ("window", "turns", r"the text 'USER1' of message 0 \(user\)"),
    ],
)
def test_what_is_lost_is_named(name, talk, match):
    (one,) = model_chat(TEMPLATES[name]).render_all(
        [conversation(TALKS[talk])], "completion"
    )
    with pytest.raises(DataError, match=match):
        raise one


@pytest.mark.parametrize("name", TALKS)
def test_settings_that_an_error_names_are_a_cure(name):
    """A variable of the template is named only where it helps."""
    chat, talk = model_chat(TEMPLATES["preserving"]), conversation(TALKS[name])
    (one,) = chat.render_all([talk], "completion")
    if "preserve_thinking" in str(one):
        kept = chat.with_kwargs({"preserve_thinking": True})
        (one,) = kept.render_all([talk], "completion")
        assert isinstance(one, Rendered), one


def test_thoughts_of_answers_that_are_not_trained_on_are_counted():
    chat = model_chat(chat_templates.QWEN3)
    talks = [conversation(TALKS[name], "last") for name in ("thoughts", "muted")]
    assert [one.num_cut for one in chat.render_all(talks, "last")] == [1, 1]
    assert "THOUGHT1" not in chat.render(talks[0].messages)
    (kept,) = (
        model_chat(TEMPLATES["preserving"])
        .with_kwargs({"preserve_thinking": True})
        .render_all([conversation(TALKS["keys"])], "completion")
    )
    assert kept.num_cut == 0 and "THOUGHT1" in kept.text


def test_a_text_of_the_template_does_not_stand_for_a_message():
    """Nor do a role, a number that the template counts, or the date."""
    template = "{{ strftime_now('%d %B') }}{% for m in messages if m.role == 'user' %}"
    template += "{{ loop.index ~ 'Be brief.' ~ m.content }}{% endfor %}"
    for content in ("Be brief.", "1", "July", "use", "ay"):
        talk = [say("system", content), say("user", "today")]
        with pytest.raises(DataError, match=r"of message 0 \(system\)"):
            model_chat(template).render(talk)


def test_a_long_text_in_another_form_takes_little_time():
    """Each of its lines has a mark."""
    lines = "\n".join(f"line {i} of the result" for i in range(20_000))
    chat = model_chat(TEMPLATES["json"])
    assert chat.render([say("system", lines), say("tool", lines), USER])


@pytest.mark.live
def test_templates_of_trl():
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("needs trl")
    folder = pathlib.Path(found.origin).parent / "chat_templates"
    paths = sorted(folder.glob("*.jinja"))
    assert len(paths) >= 20
    for path in paths:
        for loss_on in ("completion", "last"):
            check(model_chat(path.read_text()), loss_on)
