"""Tests which characters of a conversation are trained on, for many templates."""

import pytest

from jaxlora.data.formats.example import Rendered
from jaxlora.data.records.messages import read_messages
from jaxlora.errors import DataError
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import model_chat

END = "<|im_end|>"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content):
    return {"role": "tool", "content": content}


TALK = [user("Hi"), assistant("Hello!"), user("How?"), assistant("Fine.\n")]
IN_A_ROW = [user("Hi"), assistant("Hello!"), assistant("More.")]
ASSISTANT_FIRST = [assistant("Hello!"), user("How?"), assistant("Fine.")]
THINKING = [
    user("Hi"),
    assistant("<think>\nhm\n</think>\n\nHello!"),
    user("How?"),
    assistant("<think>\nwell\n</think>\n\nFine."),
]
MUTED = [THINKING[0], THINKING[1] | {"weight": 0}, *THINKING[2:]]
CALLS = [
    user("Hi"),
    assistant("", tool_calls=[CALL]),
    tool("7"),
    tool("8"),
    assistant("Seven."),
    user("How?"),
    assistant("Let me see.", tool_calls=[CALL, CALL], reasoning_content="hm"),
    tool("9"),
    assistant("Nine."),
]


def render(
    template, messages, loss_on="completion", tools=None
) -> Rendered | DataError:
    conversation = read_messages(messages, "m", is_columnar=False)
    (rendered,) = model_chat(template).render_all([conversation], loss_on)
    return rendered


def answers(template, messages) -> list[str]:
    chat = render(template, messages)
    assert isinstance(chat, Rendered), chat
    return [chat.text[start:end] for start, end in chat.target_spans]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("CHATML", TALK, [f"Hello!{END}", f"Fine.\n{END}"]),
        ("CHATML", IN_A_ROW, [f"Hello!{END}", f"More.{END}"]),
        ("CHATML", ASSISTANT_FIRST, [f"Hello!{END}", f"Fine.{END}"]),
        # The default system message is printed with the first message.
        ("SMOLLM2", ASSISTANT_FIRST, [f"Hello!{END}", f"Fine.{END}"]),
        ("LLAMA3", IN_A_ROW, ["Hello!<|eot_id|>", "More.<|eot_id|>"]),
        ("MISTRAL", TALK, ["Hello!</s>", "Fine.\n</s>"]),
        ("GEMMA", TALK, ["Hello!<end_of_turn>", "Fine.<end_of_turn>"]),
        (
            "GEMMA",
            [{"role": "system", "content": "Be brief."}, *TALK],
            ["Hello!<end_of_turn>", "Fine.<end_of_turn>"],
        ),
        ("PHI3", TALK, ["Hello!<|end|>", "Fine.\n<|end|>\n</s>"]),
        ("R1", TALK, ["Hello!</s>", "Fine.\n</s>"]),
        ("MERGING", IN_A_ROW, ["Hello!", f"\nMore.{END}"]),
        ("SEPARATED", TALK, ["Hello!<|end|>", "Fine.\n<|end|>"]),
        ("SEPARATED", MUTED, ["<think>\nwell\n</think>\n\nFine.<|end|>"]),
        ("QWEN3", TALK, [f"Hello!{END}", f"Fine.\n{END}"]),
        ("QWEN3", IN_A_ROW, [f"Hello!{END}", f"More.{END}"]),
        ("QWEN3", ASSISTANT_FIRST, [f"Hello!{END}", f"Fine.{END}"]),
        ("QWEN3", MUTED, [f"<think>\nwell\n</think>\n\nFine.{END}"]),
        (
            "QWEN3",
            CALLS,
            [
                f"{CALLED}{END}",
                f"Seven.{END}",
                f"<think>\nhm\n</think>\n\nLet me see.\n{CALLED}\n{CALLED}{END}",
                f"Nine.{END}",
            ],
        ),
        ("QWEN3", CALLS[:5], [f"{CALLED}{END}", f"Seven.{END}"]),
        ("GENERATION", TALK, [f"Hello!{END}", f"Fine.\n{END}"]),
        ("GENERATION", IN_A_ROW, [f"Hello!{END}", f"More.{END}"]),
    ],
)
def test_answers(template, messages, expected):
    assert answers(getattr(chat_templates, template), messages) == expected


def test_marks_are_removed():
    chat = render(chat_templates.QWEN3, CALLS)
    assert chat.text == model_chat(chat_templates.QWEN3).render(CALLS)


# --- Templates that mark what the model writes ---------------------------------


def test_marks_decide_also_within_a_turn():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}"
        "{{ m.content }}{% endgeneration %} (seen){% generation %}{{ '!' }}"
        "{% endgeneration %}{% else %}U: {{ m.content }}{% endif %}{% endfor %}"
    )
    assert answers(template, TALK) == ["Hello!", "!", "Fine.\n", "!"]


def test_marks_may_be_in_a_macro_and_end_in_space():
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}\n\n{% endgeneration %}"
        "{% endmacro %}{% for m in messages %}"
        "{{ say(m) if m.role != 'user' else m.content }}{% endfor %}"
    )
    assert answers(template, TALK) == ["Hello!\n\n", "Fine.\n\n\n"]


def test_a_mark_after_the_loop_belongs_to_the_last_answer():
    """TRL's template for Phi-3 prints the end of the text there."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    muted = [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]
    assert answers(template, TALK) == ["Hello!", "Fine.\n", "</s>"]
    assert answers(template, muted) == ["Fine.\n", "</s>"]


def test_a_template_that_measures_what_it_prints_keeps_its_text():
    template = (
        "{% for m in messages %}{% set t %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endset %}{{ t | length }}:{{ t }}{% endfor %}"
    )
    match = r"changes the text of its .* blocks after they are printed"
    assert match_of(render(template, TALK), match)


def test_marks_that_print_nothing_are_an_error():
    template = (
        "{% for m in messages %}{% if m.role == 'x' %}{% generation %}{% endgeneration"
        " %}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert match_of(render(template, TALK), "printed none for these messages")


def match_of(error, match) -> bool:
    with pytest.raises(DataError, match=match):
        raise error
    return True


# --- Weights -------------------------------------------------------------------


@pytest.mark.parametrize("template", ["CHATML", "QWEN3", "GENERATION"])
def test_messages_of_weight_0_are_not_learned(template):
    talk = [user("Hi"), assistant("Hello!", weight=0), *TALK[2:]]
    talk[3] = assistant("Fine.", weight=1)
    (answer,) = answers(getattr(chat_templates, template), talk)
    assert answer.endswith(f"Fine.{END}")


@pytest.mark.parametrize("template", ["CHATML", "GENERATION", "QWEN3"])
def test_messages_of_weight_0_are_not_learned_with_all_others(template):
    talk = [user("Hi"), assistant("Hello!", weight=0), *TALK[2:]]
    chat = render(getattr(chat_templates, template), talk, loss_on="all")
    (first, last) = chat.target_spans
    assert chat.text[slice(*first)].endswith("assistant\n")
    assert chat.text[first[1] : last[0]] == f"Hello!{END}"
    assert last[1] == len(chat.text)


def test_a_user_may_have_the_weight_0_too():
    talk = [dict(TALK[0], weight=0), *TALK[1:]]
    assert answers(chat_templates.CHATML, talk) == [f"Hello!{END}", f"Fine.\n{END}"]
    chat = render(chat_templates.CHATML, talk, loss_on="all")
    ((start, end),) = chat.target_spans
    assert chat.text[:start] == f"<|im_start|>user\nHi{END}"
    assert end == len(chat.text)


# --- What stays unclear ----------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "match"),
    [
        ("CHATML", TALK[:1], r"no message has the role 'assistant'.*\(roles: user\)"),
        ("MISTRAL", IN_A_ROW, "the chat template of model failed .*must alternate"),
        (
            "SEPARATED",
            ASSISTANT_FIRST,
            r"message 0 \(assistant\) is unclear: its turn begins with 'assistant: ', "
            r"but the generation prompt is '<\|end\|>assistant: '\. Set data\.loss_on",
        ),
    ],
)
def test_unclear(template, messages, match):
    assert match_of(render(getattr(chat_templates, template), messages), match)


def test_thoughts_may_need_another_generation_prompt():
    """Qwen3.5's template that prints an empty thought if thinking is not wanted."""
    template = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ ('<think></think>' if m.role "
        "== 'assistant' and '<think>' not in m.content) ~ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{{ '<think>' if enable_thinking else "
        "'<think></think>' }}{% endif %}"
    )
    talk = [user("Hi"), assistant("<think>hm</think>Hello!")]
    assert match_of(render(template, talk), r"enable_thinking: true\} makes them agree")


def test_a_template_without_a_loop_over_the_messages():
    template = "{{ messages | length }}{{ messages | map(attribute='content') | join }}"
    match = r"message 1 \(assistant\) is unclear: .* not in one pass of a loop"
    assert match_of(render(template, TALK), match)
