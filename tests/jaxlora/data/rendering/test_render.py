import json

import pytest

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import DataError, ModelError
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import SYSTEM, TALK, talk, text_of

PAIR = {"prompt": "How are you? ", "completion": "Fine."}
ALPACA = {"instruction": "Add {a}.", "input": "1 + 1", "output": "2"}
MESSAGES = {"prompt": TALK[:1], "completion": TALK[1:2]}

# --- Contradictory options ---------------------------------------------------


@pytest.mark.parametrize(
    ("record", "options", "match"),
    [
        ({"text": "x"}, {"chat": True}, "chat=true wraps .* are read as text"),
        (PAIR, {"system": "x"}, "system='x' is for chats, and the rec.* data.chat"),
        ({"text": "x"}, {"system": "x"}, r"read as text .*\)\. Remove data.system"),
        ({"text": "x"}, {"chat_template": "chatml"}, r"Remove data\.chat_template\."),
    ],
)
def test_contradictory_options(run, record, options, match):
    with pytest.raises(DataError, match=match):
        run([record], data=options)


# --- Bad records -------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "match"),
    [
        (PAIR, {"prompt": "x"}, r"field 'completion' is missing \(fields found: promp"),
        (PAIR, {"prompt": None, "completion": "x"}, "field 'prompt' is None, of type"),
        (PAIR, {"prompt": "x", "completion": ""}, "completion 'completion' is empty"),
        (PAIR, {"prompt": "\ud800", "completion": "x"}, "half of a surrogate pair at"),
        ({"text": "x"}, {"text": ["x"]}, "is .'x'., of type list, not a string"),
        (
            PAIR,
            {"prompt": "x", "completion": {"text": ["t"]}},
            r'of type dict, .* use a template: "{{ completion.text\[0\] }}"\.',
        ),
        (
            PAIR,
            {"prompt": "x", "completion": ["t"]},
            r'template: "{{ completion\[0\] }}"',
        ),
        (PAIR, {"prompt": "x", "completion": [None]}, r"Store it as text\. "),
        (ALPACA, ALPACA | {"instruction": None}, "field 'instruction' is None, of ty"),
        (ALPACA, ALPACA | {"output": ""}, "completion 'output' is empty"),
        (MESSAGES, {"prompt": "", "completion": ""}, "'prompt' is '', not a list of m"),
        (MESSAGES, MESSAGES | {"completion": TALK[:1]}, "no message .*'assistant'"),
        (
            talk(*TALK),
            talk({"role": "user", "content": [{"type": "image_url"}]}, TALK[1]),
            r"messages\[0\]\.content\[0\] is a part of type 'image_url'\. Only",
        ),
        (talk(*TALK), {"x": 1}, "field 'messages' is missing"),
        (talk(*TALK), {"messages": "x"}, "is 'x', not a list of messages"),
        (talk(*TALK), talk("x"), r"messages\[0\] is 'x', not a message"),
        (
            talk(*TALK),
            talk(TALK[0], {"role": "assistant", "content": [{"text": "x"}]}),
            r"messages\[1\]\.content\[0\] is .*of type dict, not a string",
        ),
        (
            talk(*TALK),
            talk(TALK[0], {"role": "assistant", "content": ""}),
            r"messages\[1\] is an empty answer",
        ),
        (talk(*TALK), talk({"role": 1, "content": "x"}), r"messages\[0\]\.role is 1"),
        (talk(*TALK), talk(SYSTEM, TALK[0]), r"no message .* \(roles: system, user\)"),
    ],
)
def test_bad_records_are_named(run, good, bad, match):
    cure = r"\(data\.bad_records: drop leaves out such records"
    with pytest.raises(
        DataError, match=rf"records\.jsonl: record 2: .*{match}.*{cure}"
    ):
        run([good, bad])


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (
            "{{ nope }}",
            r"failed \(UndefinedError: 'nope' is und.*found: q, null, out\)",
        ),
        ("{{ null }}", r"a value in {{ }} is null; write {{ field or '' }}"),
        ("{{ q.__class__ }}", "SecurityError"),
        ("{{ q.title }}", r"is the function 'title', not text; .* {{ x\['title'\] }}"),
        ("{{ range(3) }}", "of type range, not text"),
        ("{{ q", "does not parse"),
        ("{{ q * 10**10 }}", r"exceeds a limit: it takes more than 256 MiB of memory"),
    ],
)
@pytest.mark.usefixtures("tight_limits")
def test_bad_templates_over_fields(run, template, match):
    data = {"prompt": template, "completion": "out"}
    records = [{"q": "x", "null": None, "out": "y"}]
    with pytest.raises(DataError, match=rf"record 1: the template .*{match}"):
        run(records, data=data)


def test_refusal_of_the_chat_template_names_the_record(run, make_tokenizer):
    records = [talk(*TALK), talk(SYSTEM, *TALK)]
    with pytest.raises(DataError, match=r"record 2: the chat template of .* alternate"):
        run(records, make_tokenizer(chat_templates.MISTRAL))


def test_chat_needs_a_template(run, make_folder):
    with pytest.raises(ModelError, match="has no chat template"):
        run([talk(*TALK)], load_tokenizer(make_folder(config={})))


def test_append_eos_needs_an_eos(run, make_folder):
    tokenizer = load_tokenizer(make_folder(config={}))
    with pytest.raises(
        DataError, match="append_eos=true, but the tokenizer has no end"
    ):
        run([PAIR], tokenizer)
    assert run([PAIR], tokenizer, data={"append_eos": False}).samples


# --- Records that are dropped --------------------------------------------------


def test_bad_records_can_be_dropped(run, caplog):
    bad = [talk(SYSTEM, TALK[0]), {"messages": "x"}, talk({"role": 1})]
    records = [talk(*TALK), *bad, talk(*TALK), *bad]
    result = run(records, data={"bad_records": "drop"})
    assert (len(result.samples), result.num_bad, result.num_records) == (2, 6, 8)
    assert result.summary().endswith("; 6 of 8 samples were unusable: dropped.")
    said = [record.getMessage() for record in caplog.records]
    assert "records.jsonl: dropped record 2: no message has the role" in said[0]
    assert len(said) == 6 and "further records that are dropped" in said[-1]


def test_lines_that_cannot_be_read_are_dropped_and_counted(
    tmp_path, make_tokenizer, caplog
):
    path = tmp_path / "a.jsonl"
    pair = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    path.write_text("\n".join(["{", pair, "[]", "{}", pair]))
    data = DataConfig(path=str(path), bad_records="drop")
    job = LoraJob(name="job", data=data, objective="simpo")
    read = DataReader(make_tokenizer()).read(job)
    assert (len(read.samples), read.num_bad, read.num_records) == (4, 3, 5)
    said = [record.getMessage().split(": ", 1)[1] for record in caplog.records]
    starts = ["line 1: is not valid", "line 3: holds a list", "record 4: field"]
    for text, start in zip(said, starts, strict=True):
        assert text.startswith(f"dropped {start}") and str(path) not in text


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_an_error_names_its_file_once(tmp_path, make_tokenizer, name):
    path = tmp_path / name
    path.write_text("{\n")
    job = LoraJob(name="job", data=DataConfig(path=str(path)))
    with pytest.raises(DataError) as error:
        DataReader(make_tokenizer()).read(job)
    assert str(error.value).count(name) == 1


def test_a_record_that_exceeds_the_limits_can_be_dropped(run, tight_limits):
    prompt = (
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}x{{ n }}"
    )
    records = [{"n": n, "completion": "y"} for n in (1, 99999, 2, 3)]
    result = run(records, data={"prompt": prompt, "bad_records": "drop"})
    assert (len(result.samples), result.num_bad) == (3, 1)
    match = (
        r"record 2: the template .* exceeds a limit: it takes more than 0\.3 s\. Sho"
    )
    with pytest.raises(DataError, match=match):
        run(records, data={"prompt": prompt})


def test_a_bad_record_may_come_first(run):
    records = [{}, {"x": 1}, talk(*TALK)]
    result = run(records, data={"bad_records": "drop"})
    assert (len(result.samples), result.num_bad) == (1, 2)


def test_a_bad_record_does_not_hide_the_named_field(run):
    records = [{"text": "x"}, {"talk": TALK}]
    data = {"messages": "talk", "bad_records": "drop"}
    result = run(records, data=data)
    assert (len(result.samples), result.num_bad) == (1, 1)


def test_all_records_dropped(run):
    match = r"and 2 cannot be used \(the first: record 1: field 'messages' is 'x'"
    with pytest.raises(DataError, match=match):
        run([{"messages": "x"}] * 2, data={"bad_records": "drop", "kind": "messages"})


# --- Tools, weights, parts -----------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": None}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_go_to_the_template(run, make_tokenizer, tools, caplog):
    tokenizer = make_tokenizer(chat_templates.QWEN3)
    text = text_of(run, tokenizer, talk(*TALK) | {"tools": tools})
    assert text == tokenizer.chat.render(TALK, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in text
    assert not caplog.records


def test_tools_select_their_template(run, make_folder):
    named = [
        {"name": "default", "template": chat_templates.CHATML},
        {"name": "tool_use", "template": "TOOLS:" + chat_templates.QWEN3},
    ]
    tokenizer = load_tokenizer(make_folder(config={"chat_template": named}))
    records = [talk(*TALK), talk(*TALK) | {"tools": TOOLS}, talk(*TALK)]
    samples = run(records, tokenizer, data={"append_eos": False}).samples
    starts = [tokenizer.decode(sample.token_ids)[:6] for sample in samples]
    assert starts == ["<|im_s", "TOOLS:", "<|im_s"]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools(run, make_tokenizer, tools):
    tokenizer = make_tokenizer(chat_templates.LLAMA3)
    text = text_of(run, tokenizer, talk(*TALK) | {"tools": tools})
    assert text == tokenizer.chat.render(TALK)


def test_tools_of_a_wrapped_pair(run, make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.QWEN3)
    text = text_of(run, tokenizer, PAIR | {"tools": TOOLS}, chat=True)
    assert json.dumps(TOOLS[0]) in text


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ("[", r"field 'tools' is '\[', which is not valid JSON"),
        ('{"name": "f"}', r"field 'tools' is .*, not a list of tools"),
        (7, "field 'tools' is 7, not a list of tools"),
        ([{"function": {"parameters": "x"}}], r"parameters of tools\[0\] are 'x'"),
    ],
)
def test_bad_tools(run, make_tokenizer, tools, match):
    with pytest.raises(DataError, match=match):
        run([talk(*TALK) | {"tools": tools}], make_tokenizer(chat_templates.QWEN3))


def test_nulls_of_columnar_files_are_absent_in_tools_and_calls(run, make_tokenizer):
    def called(**arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    tools = [
        {"name": "f", "parameters": {"x": {"type": "int"}}},
        {"name": "g", "parameters": {"y": {"type": "str"}}},
    ]
    messages = [TALK[0], called(x=1), called(y=2)]
    record = {"messages": messages, "tools": tools}
    tokenizer = make_tokenizer(chat_templates.QWEN3)
    (sample,) = run([record], tokenizer, suffix=".parquet").samples
    text = tokenizer.decode(sample.token_ids)
    assert text == tokenizer.chat.render(messages, tools=tools)
    assert "null" not in text


def test_nulls_of_json_stay(run, make_tokenizer):
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    tokenizer = make_tokenizer(chat_templates.QWEN3)
    assert '{"x": null}' in text_of(run, tokenizer, talk(TALK[0], answer))


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (-1, r"messages\[1\]\.weight is -1\. Write 1 .* from 0\.0001 to 10000, by"),
        (float("nan"), r"weight is nan"),
        ([], r"weight is \[\]"),
    ],
)
def test_bad_weights(run, weight, match):
    with pytest.raises(DataError, match=match):
        run([talk(TALK[0], dict(TALK[1], weight=weight))])


@pytest.mark.parametrize("weight", [0, 0.0, False])
def test_weight_0(run, make_tokenizer, weight):
    tokenizer = make_tokenizer("{{ messages[1] | tojson }}" + chat_templates.SMOLLM2)
    messages = [TALK[0], dict(TALK[1], weight=weight), *TALK[2:]]
    (sample,) = run([talk(*messages)], tokenizer).samples
    learned = tokenizer.decode(sample.token_ids[sample.is_target])
    assert learned == "Fine.\n<|im_end|>"
    assert "weight" not in tokenizer.decode(sample.token_ids)


def test_weight_0_of_speakers_and_of_empty_answers(run, make_tokenizer):
    messages = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "", "weight": 0},
        {"from": "gpt", "value": "Hello!", "weight": None},
    ]
    tokenizer = make_tokenizer()
    (sample,) = run([talk(*messages)], tokenizer).samples
    learned = tokenizer.decode(sample.token_ids[sample.is_target])
    assert learned == "Hello!<|im_end|>"


def test_a_record_of_weight_0_is_not_trained_on(run):
    records = [talk(TALK[0], dict(TALK[1], weight=0)), talk(*TALK)]
    result = run(records)
    assert (len(result.samples), result.num_without_target) == (1, 1)


def test_a_template_may_have_roles_of_share_gpt(run, make_tokenizer):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    said = [{"role": "human", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    roles = {"human": "human"}
    text = text_of(run, make_tokenizer(template), talk(*said), roles=roles)
    assert text.startswith("human: Hi;assistant: Yo;")


# --- Fields that are not used --------------------------------------------------


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (talk(*TALK) | {"tools": TOOLS}, "the field 'tools'"),
        (talk(*TALK) | {"functions": TOOLS}, "the field 'functions'"),
        (talk(*TALK) | {"documents": ["x"]}, "the field 'documents'"),
        (PAIR | {"label": 0}, "the field 'label'"),
        (PAIR | {"system_message": "x"}, "the field 'system_message'"),
        (
            talk(*TALK) | {"chat_template_kwargs": {"a": 1}},
            "the field 'chat_template_kwargs'",
        ),
        (PAIR | {"weight": 0}, "the field 'weight'"),
        (talk(*TALK) | {"kto_tag": "1"}, "the field 'kto_tag'"),
        (talk(TALK[0], dict(TALK[1], thought="x")), "the key 'thought' of messages"),
        ({"text": "xyz", "images": ["a.png"]}, "the field 'images'"),
        (talk(TALK[0], dict(TALK[1], train=False)), "the key 'train' of messages"),
        (
            talk(TALK[0], dict(TALK[1], reasoning_content="hm")),
            "the key 'reasoning_content' of messages",
        ),
    ],
)
def test_unused_fields_are_reported_once(run, record, named, caplog):
    run([record] * 3, eval_fraction=0.3)
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert f"records.jsonl: {named} is not used" in said


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (PAIR | {"weight": None, "tools": [], "images": ""}, {}),
        ({"weight": "7 kg", "completion": "x"}, {"prompt": "Weigh: {{ weight }}"}),
        ({"system": "x", "completion": "x"}, {"prompt": "system"}),
        (talk(*TALK) | {"id": 3, "label": 7}, {}),
        (PAIR | {"label": "1"}, {"system": "{{ label }}", "chat": True}),
    ],
)
def test_used_or_empty_fields_are_not_reported(run, record, options, caplog):
    run([record], data=options)
    assert not caplog.records
