"""Tests the formats that people have their data in, and how they are told apart.

The expected texts are written by hand, after the pages of Stanford Alpaca and
Alpaca-LoRA, ShareGPT, OpenAI and TRL that define the formats.
"""

import logging

import pytest

from jaxlora.config import DataConfig
from jaxlora.data.formats.table import choose_reading
from jaxlora.errors import DataError
from tests.jaxlora.data import chat_templates

ALPACA = {"instruction": "Add {a}.", "input": "1 + 1", "output": "2"}
ASK = {"role": "user", "content": "What color is the sky?"}
ANSWER = {"role": "assistant", "content": "It is blue."}


def shown(run, tokenizer, record, **options) -> str:
    (sample,) = run([record], tokenizer, data=options).samples
    return chat_templates.shown(tokenizer, sample)


# --- Alpaca --------------------------------------------------------------------------

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides "
    "further context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd {a}.\n\n### Input:\n1 + 1\n\n### Response:\n[[2</s>]]"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.\n\n"
    "### Instruction:\nAdd {a}.\n\n### Response:\n[[2</s>]]"
)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"input": "1 + 1"}, WITH_INPUT),
        ({"input": ""}, WITHOUT_INPUT),
        ({"input": None}, WITHOUT_INPUT),
        ({}, WITHOUT_INPUT),
    ],
)
def test_alpaca(run, make_tokenizer, given, wanted):
    record = {"instruction": "Add {a}.", **given, "output": "2"}
    assert shown(run, make_tokenizer(), record) == wanted


def test_alpaca_in_a_chat_template(run, make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.CHATML)
    assert shown(run, tokenizer, ALPACA, chat=True, system="Count.") == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nAdd {a}.\n1 + 1"
        "<|im_end|>\n<|im_start|>assistant\n[[2<|im_end|>]]\n"
    )
    without = {"instruction": "Add.", "input": "", "output": "2"}
    assert shown(run, tokenizer, without, chat=True) == (
        "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n[[2<|im_end|>]]\n"
    )


# --- ShareGPT ------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_sharegpt_with_calls(run, make_tokenizer, keys):
    said = {
        "human": "Time?",
        "function_call": '{"name": "now", "arguments": {}}',
        "observation": "12",
        "gpt": "Noon.",
    }
    talk = [dict(zip(keys, one, strict=True)) for one in said.items()]
    record = {"conversations": talk}
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}</>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert shown(run, make_tokenizer(template), record) == (
        '<user>Time?</><assistant>[[{"name": "now", "arguments": {}}</>]]<tool>12</>'
        "<assistant>[[Noon.</>]]"
    )


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_names_of_speakers(run, make_tokenizer, caplog, keys):
    names = ("human", "model", "User", "Bot", "HUMAN", "GPT", "user", "chatgpt")
    names += ("Tool", "tool_response", "x")
    said = enumerate(names)
    talk = [dict(zip(keys, (name, f"{i}"), strict=True)) for i, name in said]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    record = {"conversations": talk}
    assert shown(run, make_tokenizer(template), record, roles={"x": "user"}) == (
        "<user>0<assistant>[[1]]<user>2<assistant>[[3]]<user>4<assistant>[[5]]<user>6"
        "<assistant>[[7]]<tool>8<tool>9<user>10"
    )
    assert not caplog.records


@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_roles_that_are_not_trained_on_are_reported_once(
    run, make_tokenizer, caplog, keys
):
    def talk(*roles):
        return {"messages": [dict(zip(keys, (r, "x"), strict=True)) for r in roles]}

    tokenizer = make_tokenizer(chat_templates.CHATML)
    records = [talk("developer", "user", "agent", "assistant", "tool")] * 2
    run(records, tokenizer)
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert said.endswith(
        "records.jsonl: messages with the role 'agent' are not trained on. If they are "
        "the assistant's, set data.roles to {agent: assistant}."
    )
    caplog.clear()
    run(records, tokenizer, data={"loss_on": "all"})
    run(records, make_tokenizer(chat_templates.GENERATION))
    assert not caplog.records
    match = (
        r"no message has the role 'assistant', .* \(roles: user, agent\)\. If the "
        r"assistant has another name there, set data.roles to \{NAME: assistant\}; if "
        r"not, remove the record, or set data\.loss_on to all\."
    )
    with pytest.raises(DataError, match=match):
        run([talk("user", "agent")], tokenizer)


@pytest.mark.parametrize("value", ["now()", "3", '["x"]', "[" * 10_000, None])
def test_bad_calls_of_sharegpt(run, make_tokenizer, value):
    talk = [{"from": "human", "value": "x"}, {"from": "function_call", "value": value}]
    with pytest.raises(
        DataError, match=r"conversations\[1\]\.value is .*, not the call"
    ):
        run([{"conversations": talk}], make_tokenizer(chat_templates.CHATML))


# --- OpenAI --------------------------------------------------------------------------


def test_content_parts(run, make_tokenizer):
    parts = [{"type": "text", "text": one} for one in ("It is ", "blue.")]
    parts[1]["image"] = None
    record = {"messages": [ASK, {"role": "assistant", "content": parts}]}
    assert shown(run, make_tokenizer(chat_templates.CHATML), record) == (
        "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n"
        "[[It is blue.<|im_end|>]]\n"
    )


# --- TRL -----------------------------------------------------------------------------


def test_conversational_prompt_and_completion(run, make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.CHATML)
    before = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
    ]
    record = {"prompt": [*before, ASK], "completion": [ANSWER]}
    start = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{}\n<|im_start|>user\n"
        "What color is the sky?<|im_end|>\n<|im_start|>assistant\n"
    )
    wanted = start.format("Yes<|im_end|>") + "[[It is blue.<|im_end|>]]\n"
    assert shown(run, tokenizer, record) == wanted
    (sample,) = run([record], tokenizer, data={"loss_on": "all"}).samples
    assert sample.is_target[1:].all()


def test_conversational_prompts_of_columnar_files(run, make_tokenizer):
    record = {"prompt": [ASK | {"name": None}], "completion": [ANSWER | {"name": "x"}]}
    tokenizer = make_tokenizer(chat_templates.CHATML)
    (sample,) = run([record], tokenizer, suffix=".parquet").samples
    assert tokenizer.decode(sample.token_ids).endswith("It is blue.<|im_end|>\n")


@pytest.mark.parametrize(
    ("records", "options", "match"),
    [
        (
            [{"prompt": [ASK], "completion": "It is blue."}],
            {},
            "field 'prompt' is a list of messages, and 'completion' is not. Make both",
        ),
        (
            [{"prompt": "x", "completion": [ANSWER]}],
            {},
            "field 'completion' is a list of messages, and 'prompt' is not",
        ),
        (
            [{"prompt": [ASK], "completion": [ANSWER]}],
            {"chat": True},
            r"chat=true wraps prompt .* read as prompt_completion \(prompt, completion"
            r": lists of messages\)",
        ),
    ],
)
def test_bad_conversational_prompts(run, records, options, match):
    with pytest.raises(DataError, match=rf"records\.jsonl: .*{match}"):
        run(records, data=options)


# --- Which format --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "options", "reading"),
    [
        ({"instruction": 1, "output": 1}, {}, "alpaca (instruction, output)"),
        (ALPACA | {"id": 1}, {}, "alpaca (instruction, input, output)"),
        (ALPACA | {"text": "x"}, {"kind": "text"}, "text (text)"),
        (
            ALPACA | {"text": "x"},
            {"kind": "alpaca"},
            "alpaca (instruction, input, output)",
        ),
        ({"prompt": 1, "prompt_id": 1, "messages": 1}, {}, "messages (messages)"),
        ({"text": 1, "label": 1}, {}, "text (text)"),
        ({"messages": 1, "text": 1}, {"kind": "text"}, "text (text)"),
        (
            {"q": 1, "a": 1, "text": 1},
            {"prompt": "q", "completion": "a"},
            "prompt_completion (q, a)",
        ),
        ({"talk": 1, "text": 1}, {"messages": "talk"}, "messages (talk)"),
        ({"conversations": []}, {}, "messages (conversations)"),
        ({"conversations": []}, {"kind": "messages"}, "messages (conversations)"),
        ({"conversations": [], "talk": []}, {"messages": "talk"}, "messages (talk)"),
        (
            ALPACA,
            {"prompt": "{{ instruction }}", "completion": "output"},
            "prompt_completion (a template, output)",
        ),
        (
            {"prompt": [], "completion": []},
            {},
            "prompt_completion (prompt, completion: lists of messages)",
        ),
    ],
)
def test_readings(record, options, reading):
    assert str(choose_reading(DataConfig(path="x", **options), record)) == reading


@pytest.mark.parametrize(
    ("record", "options", "match"),
    [
        (
            ALPACA | {"text": "x"},
            {},
            r"can be read as text \(text\) or as alpaca \(instruction, input, output\) "
            r"\(fields found: .*\)\. Set data\.kind to the one .*: text or alpaca\.",
        ),
        (
            {"messages": [], "conversations": []},
            {},
            r"read as messages \(messages\) or as messages \(conversations\) .* Set "
            r"data\.messages to the one that is meant: messages or conversations\.",
        ),
        (
            {"messages": [], "conversations": []},
            {"kind": "messages"},
            r"Set data\.messages to the one",
        ),
        (
            {"question": 1},
            {},
            "records have the fields question; expected 'prompt' and 'completion', or "
            "'messages', or 'conversations', or 'text', or 'instruction' and 'output'",
        ),
        (
            {"messages": []},
            {"text": "body"},
            r"data\.text is 'body', but the records are read as messages \(messages\) "
            r"\(fields found: messages\), .* Remove data\.text; or set "
            r"data\.kind to text, and data\.text to fields that the records have\.",
        ),
        (
            {"text": "x", "talk": []},
            {"messages": "tlk"},
            r"data\.messages is 'tlk', but .* text \(text\) .*found: text, talk\)",
        ),
        (
            ALPACA,
            {"prompt": "{{ instruction }}"},
            r"data\.prompt is .* read as alpaca .* set data\.kind to "
            r"prompt_completion, and data\.prompt and data\.completion to fields",
        ),
        (
            ALPACA | {"p": "x"},
            {"kind": "alpaca", "prompt": "p"},
            r"data\.prompt is 'p', but the records are read as alpaca",
        ),
        (
            {"talk": [], "body": "x"},
            {"messages": "talk", "text": "body"},
            r"data\.text is 'body', but the records are read as messages \(talk\)",
        ),
        (
            {"messages": [], "text": "x"},
            {"completion": "answer"},
            r"data\.completion is 'answer', but",
        ),
    ],
)
def test_a_reading_is_never_guessed(record, options, match):
    with pytest.raises(DataError, match=match):
        choose_reading(DataConfig(path="x", **options), record)


def test_an_error_of_the_reading_names_the_file(run):
    with pytest.raises(DataError, match=r"records\.jsonl: records have the fields q;"):
        run([{"q": "x"}])


def test_one_line_of_the_log_says_how_records_are_read(run, make_tokenizer, caplog):
    caplog.set_level(logging.INFO, "jaxlora")
    record = {"prompt": "How are you? ", "completion": "Fine." + "!" * 300}
    run([record] * 1200, make_tokenizer())
    (line,) = [entry.getMessage() for entry in caplog.records]
    start, _, end = line.partition("!" * 75)
    assert start.endswith(
        "records.jsonl: 1,200 records are read as prompt_completion (prompt, "
        "completion); the first, with what is trained on in [[ ]]: 'How are you? "
        "[[Fine."
    )
    assert end == " ... " + "!" * 76 + "</s>]]'"
