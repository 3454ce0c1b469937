"""Tests system messages from a field of the records, a template, or the setting."""

import pytest

from jaxlora.errors import DataError
from tests.jaxlora.data import chat_templates

ASK = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yo", "weight": 0.5}
OWN = {"role": "system", "content": "Own."}
SPOKEN = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yo<|im_end|>]]\n"
ORCA = {"id": "x", "system_prompt": "Be kind.", "question": "Hi", "response": "Yo"}
ALPACA = {"instruction": "Hi", "input": "", "output": "Yo"}


def system(text: str) -> str:
    return f"<|im_start|>system\n{text}<|im_end|>\n"


@pytest.fixture
def texts(run, make_tokenizer):
    """Renders records; what is trained on is in [[ ]]."""

    def texts(records, which="train", **options):
        data, job = options, {"objective": options.pop("objective", "next_token")}
        tokenizer = make_tokenizer(chat_templates.CHATML)
        samples = run(records, tokenizer, which, data, **job).samples
        return [chat_templates.shown(tokenizer, sample) for sample in samples]

    return texts


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"messages": [ASK, ANSWER]}, {}),
        ({"conversations": SPOKEN}, {}),
        ({"prompt": "Hi", "completion": "Yo"}, {"chat": True}),
        ({"prompt": [ASK], "completion": [ANSWER]}, {}),
        (ALPACA, {"chat": True}),
        (
            {"question": "Hi", "response": "Yo"},
            {"prompt": "question", "completion": "response", "chat": True},
        ),
        (
            {"messages": [ASK, ANSWER | {"weight": 1}], "label": True},
            {"objective": "kto"},
        ),
        (
            {"prompt": "Hi", "completion": "Yo", "label": 1},
            {"objective": "kto", "chat": True},
        ),
    ],
)
@pytest.mark.parametrize(
    ("field", "setting", "wanted"),
    [
        ("Be kind.", "about", system("Be kind.")),
        ("", "about", ""),
        (None, "about", ""),
        ("kind", "Be {{ about }}!", system("Be kind!")),
        (None, "{{ about or '' }}", ""),
        ("Be kind.", "Be very brief.", system("Be very brief.")),
        ("Be kind.", None, ""),
        ("Be kind.", "", ""),
    ],
)
def test_a_field_becomes_the_system_message(
    texts, record, options, field, setting, wanted
):
    records = [record | {"about": field}]
    assert texts(records, system=setting, **options) == [wanted + CHAT]


def test_each_record_has_its_own(texts):
    records = [
        {"messages": [ASK, ANSWER], "about": about} for about in ("A", None, "B")
    ]
    assert texts(records, system="about") == [
        system("A") + CHAT,
        CHAT,
        system("B") + CHAT,
    ]


def test_weights_stay_with_their_messages(run, make_tokenizer):
    said = [ASK, ANSWER | {"weight": 0}, ASK, ANSWER, ASK, ANSWER | {"weight": 1}]
    tokenizer = make_tokenizer(chat_templates.CHATML)
    found = []
    for setting in (None, "Be kind, please."):
        data = run([{"messages": said}], tokenizer, data={"system": setting})
        (sample,) = data.samples
        found.append(
            (
                tokenizer.decode(sample.token_ids[sample.is_target]),
                sample.target_weights.tolist(),
            )
        )
    assert found[0] == found[1]
    assert set(found[0][1]) == {0.5, 1.0}


def test_pairs_have_system_messages(texts):
    pair = {"about": "Be kind.", "question": "Hi", "chosen": "Yo", "rejected": "No"}
    options = {
        "prompt": "question",
        "system": "about",
        "objective": "simpo",
        "chat": True,
    }
    both = [system("Be kind.") + CHAT, system("Be kind.") + CHAT.replace("Yo", "No")]
    assert texts([pair], **options) == both
    said = [{"role": "assistant", "content": text} for text in ("Yo", "No")]
    pair = {"about": "Be kind.", "chosen": [ASK, said[0]], "rejected": [ASK, said[1]]}
    assert texts([pair], system="about", objective="simpo") == both


@pytest.mark.parametrize("role", ["system", "developer", "System"])
def test_the_message_of_the_record_is_used_and_counted(texts, caplog, role):
    own = {"messages": [OWN | {"role": role}, ASK, ANSWER], "about": "Be kind."}
    records = [
        own,
        own | {"about": None},
        {"messages": [ASK, ANSWER], "about": "B"},
        own,
    ]
    found = texts(
        records,
        system="about",
        chat_template="{% for m in messages %}{{ m.content }}|{% endfor %}",
    )
    assert [text.partition("|")[0] for text in found] == ["Own.", "Own.", "B", "Own."]
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert said.endswith(
        "2 chats: the record's own system message is used, not that of data.system."
    )


def test_records_of_open_orca_are_known(texts, caplog):
    records = [ORCA, ORCA | {"system_prompt": ""}, ORCA | {"system_prompt": None}]
    assert texts(records) == [system("Be kind.") + CHAT, CHAT, CHAT]
    assert texts(records[:1], system="Be brief, please.") == [
        system("Be brief, please.") + CHAT
    ]
    named = {"prompt": "question", "completion": "response"}
    assert texts(records[:1], **named) == ["Hi[[Yo</s>]]"]
    assert "Set data.system to system_prompt" in caplog.records[-1].getMessage()


def test_columns_hold_nulls(run, make_tokenizer):
    rows = [{"messages": [ASK, ANSWER], "about": about} for about in (None, "A")]
    tokenizer = make_tokenizer(chat_templates.CHATML)
    read = run(rows, tokenizer, data={"system": "about"}, suffix=".parquet")
    texts = [tokenizer.decode(sample.token_ids) for sample in read.samples]
    starts = [text.partition("<|im_end|>")[0] for text in texts]
    assert starts == ["<|im_start|>user\nHi", "<|im_start|>system\nA"]


def test_fields_and_texts_of_any_language_are_told_apart(texts):
    record = {"messages": [ASK, ANSWER], "system prompt": "A"}
    assert texts([record], system="system prompt") == [system("A") + CHAT]
    assert texts([record], system="你是一个助手。") == [system("你是一个助手。") + CHAT]


@pytest.mark.parametrize(
    ("record", "options", "match"),
    [
        (
            {"messages": [ASK, ANSWER]},
            {"system": "abuot"},
            r"record 1: data.system is 'abuot', .*: messages\).*default\('', true\)",
        ),
        (
            {"messages": [ASK, ANSWER], "a": 3},
            {"system": "a"},
            "field 'a' is 3, of type",
        ),
        (
            {"messages": [ASK, ANSWER], "a": 3},
            {"system": "{{ b }}"},
            "'b' is undefined",
        ),
        ({"text": "a"}, {"system": "Be kind."}, "is for chats, and the records .* tex"),
        (
            {"prompt": "a", "completion": "b"},
            {"system": "a b"},
            "Set data.chat to true",
        ),
        (
            {"input_ids": [1], "target_token_ids": [[]], "target_logprobs": [[]]},
            {"system": "a b", "objective": "distill"},
            "Remove data.system",
        ),
    ],
)
def test_mistakes(texts, record, options, match):
    with pytest.raises(DataError, match=match):
        texts([record], **options)


def test_chats_of_open_orca_have_variables_of_the_template(run, make_tokenizer):
    template = "{{ 'BRIEF ' if brief }}" + chat_templates.CHATML
    data = {"chat_template_kwargs": {"brief": True}}
    tokenizer = make_tokenizer(template)
    (sample,) = run([ORCA], tokenizer, data=data).samples
    assert tokenizer.decode(sample.token_ids).startswith("BRIEF <|im_start|>system")
