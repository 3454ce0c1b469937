import pytest

from jaxlora.config import DataConfig
from jaxlora.data.render import choose_kind
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import DataError, ModelError
from tests.jaxlora.data import templates
from tests.jaxlora.data.templates import SYSTEM, TALK

PAIR = {"prompt": "How are you? ", "completion": "Fine."}

# --- Which kind --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "options", "kind"),
    [
        ("prompt completion id", {}, "prompt_completion"),
        ("prompt prompt_id messages", {}, "messages"),
        ("text label", {}, "text"),
        ("q a text", {"prompt": "q", "completion": "a"}, "prompt_completion"),
        ("q a text", {"prompt": "{{ q }}", "completion": "a"}, "prompt_completion"),
        ("talk text", {"messages": "talk"}, "messages"),
        ("messages text", {"kind": "text"}, "text"),
    ],
)
def test_kind(fields, options, kind):
    first = dict.fromkeys(fields.split(), "x")
    assert choose_kind(DataConfig(path="x", **options), first) == kind


def test_kind_that_cannot_be_told(run):
    match = (
        r"records\.jsonl: records have the fields q, a; wanted are 'prompt' and "
        "'completion', or 'messages', or 'text'"
    )
    with pytest.raises(DataError, match=match):
        run([{"q": "x", "a": "y"}])
    match = r"can be read as messages or as text \(fields found: messages, text\)"
    with pytest.raises(DataError, match=match):
        run([{"messages": TALK, "text": "x"}])


@pytest.mark.parametrize(
    ("record", "options", "match"),
    [
        ({"text": "x"}, {"chat": True}, "chat=true wraps .* are read as text"),
        (PAIR, {"system": "x"}, "system='x' is used only with data.chat"),
    ],
)
def test_options_that_contradict(run, record, options, match):
    with pytest.raises(DataError, match=match):
        run([record], data=options)


# --- Bad records -------------------------------------------------------------


def talk(*messages):
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("good", "bad", "match"),
    [
        (
            PAIR,
            {"prompt": "x"},
            r"field 'completion' is missing \(fields found: prompt",
        ),
        (
            PAIR,
            {"prompt": 3, "completion": "x"},
            "field 'prompt' is 3, of type int, no",
        ),
        (PAIR, {"prompt": None, "completion": "x"}, "field 'prompt' is None, of type"),
        (PAIR, {"prompt": "x", "completion": ""}, "completion 'completion' is empty"),
        (PAIR, {"prompt": "\ud800", "completion": "x"}, "half of a surrogate pair at"),
        ({"text": "x"}, {"text": ["x"]}, "is .'x'., of type list, not a string"),
        (talk(*TALK), {"x": 1}, "field 'messages' is missing"),
        (talk(*TALK), {"messages": "x"}, "is 'x', not a list of messages"),
        (talk(*TALK), {"messages": []}, r"is \[\], not a list of messages"),
        (talk(*TALK), talk("x"), r"messages\[0\] is 'x', not a message"),
        (talk(*TALK), talk({"content": "x"}), r"messages\[0\] is .*, not a message"),
        (
            talk(*TALK),
            talk(TALK[0], {"role": "assistant", "content": [{"text": "x"}]}),
            r"messages\[1\]\.content is .*of type list, not a string",
        ),
        (
            talk(*TALK),
            talk(TALK[0], {"role": "assistant", "content": ""}),
            r"messages\[1\] is an empty answer",
        ),
        (talk(*TALK), talk({"role": 1, "content": "x"}), r"messages\[0\]\.role is 1"),
        (talk(*TALK), talk(SYSTEM, TALK[0]), r"no message .* \(roles: system, user\)"),
        (talk(*TALK), talk(*TALK[1:]), "is not prefix-stable"),
    ],
)
def test_bad_records_are_named(run, good, bad, match):
    with pytest.raises(DataError, match=rf"records\.jsonl: record 2: .*{match}"):
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
        ("{{ q", "does not parse"),
        ("{{ q }}{% for a in 'a' * 99999999 %}{% endfor %}", "cost more than"),
    ],
)
def test_bad_templates_over_fields(run, template, match):
    data = {"prompt": template, "completion": "out"}
    records = [{"q": "x", "null": None, "out": "y"}]
    with pytest.raises(DataError, match=rf"record 1: the template .*{match}"):
        run(records, data=data)


def test_refusal_of_the_chat_template_names_the_record(run, make_tokenizer):
    records = [talk(*TALK), talk(SYSTEM, *TALK)]
    with pytest.raises(DataError, match=r"record 2: the chat template of .* alternate"):
        run(records, make_tokenizer(templates.MISTRAL))


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
