"""Formats of users are read as ours are, or are refused with the reason."""

import inspect
import json

import pytest

import jaxlora
from jaxlora import DataConfig, Example, LoraJob
from jaxlora.data.formats.register import register_format
from jaxlora.data.formats.table import FORMATS
from jaxlora.data.tokens.token_cache import TokenCache
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError, DataError

ASK = {"role": "user", "content": "What color is the sky?"}
ANSWER = {"role": "assistant", "content": "It is blue."}
OTHER = {"role": "assistant", "content": "It is red."}


@pytest.fixture(autouse=True)
def own_formats():
    """Names that a test registers are free again after it."""
    before = list(FORMATS)
    yield
    FORMATS[:] = before


NAN = float("nan")
PAIRS, LABELS = {"gives": "preference"}, {"gives": "unpaired"}


def pair(record):
    return Example(record["a"], (record["b"], record["c"]), margin=record["m"])


@pytest.mark.parametrize(
    ("convert", "own", "record", "job", "data"),
    [
        (
            lambda r: Example(r["a"], (r["b"],), weight=r["w"]),
            {"a": "How? ", "b": "So.", "w": 2.0},
            {"prompt": "How? ", "completion": "So.", "w": 2.0},
            {},
            {"weight": "w"},
        ),
        (
            lambda r: Example(completions=([*r["a"], r["b"]],), system="Be kind."),
            {"a": [ASK], "b": ANSWER},
            {"messages": [ASK, ANSWER]},
            {},
            {"system": "Be kind."},
        ),
        (
            pair,
            {"a": "How? ", "b": "So.", "c": "No.", "m": 0.5},
            {"prompt": "How? ", "chosen": "So.", "rejected": "No.", "margin": 0.5},
            {"objective": "reward"},
            {},
        ),
        (
            pair,
            {"a": [ASK], "b": [ANSWER], "c": [OTHER], "m": None},
            {"prompt": [ASK], "chosen": [ANSWER], "rejected": [OTHER]},
            {"objective": "dpo"},
            {},
        ),
        (
            lambda r: Example([r["a"]], ([r["b"]],), label=r["good"] == "yes"),
            {"a": ASK, "b": ANSWER, "good": "yes"},
            {"prompt": [ASK], "completion": [ANSWER], "label": True},
            {"objective": "kto"},
            {},
        ),
    ],
)
def test_a_registered_format_gives_the_tokens_of_ours(
    run, convert, own, record, job, data
):
    gives = {"reward": "preference", "dpo": "preference", "kto": "unpaired"}
    gives = gives.get(job.get("objective"), "completion")
    jaxlora.register_format("mine", convert, gives=gives)
    found = run([own], data={"kind": "mine"}, **job)
    assert found.fingerprint == run([record], data=data, **job).fingerprint
    assert found.num_target_tokens


def test_the_first_record_that_fits_decides(run):
    register_format(
        "mine", lambda r: Example([r["a"]], ([r["b"]],)), fits=lambda r: "a" in r
    )
    records = [{"x": 1}, {"a": ASK, "b": ANSWER}, {"a": ASK, "b": "text"}]
    found = run(records, data={"kind": "mine", "bad_records": "drop"})
    assert len(found.samples) == 1 and found.num_bad == 2


@pytest.mark.parametrize(
    ("convert", "options", "message"),
    [
        (lambda r: r["b"], {}, "'mine' does not convert the record: KeyError: 'b'"),
        (pair, {"fits": lambda r: r["q"]}, "fits fails for the record: KeyError: 'q'"),
        (lambda r: "text", {}, "'mine' makes 'text', not a jaxlora.Example"),
        (lambda r: Example(r["a"]), {}, r"the completions \(\), not a tuple of 1"),
        (lambda r: Example("x", ("y",)), PAIRS, "not a tuple of 2"),
        (lambda r: Example("x", ("y",), label=True), {}, "label True, and gives compl"),
        (lambda r: Example("x", ("y",)), LABELS, "label None, and gives unpaired"),
        (lambda r: Example("x", ("y",), margin=1), {}, "the margin 1, which is a numb"),
        (lambda r: Example("x", ("y", "z"), margin=NAN), PAIRS, "the margin nan, whi"),
        (lambda r: Example("x", ("y",), weight=0), {}, "the weight 0, which must be"),
        (lambda r: Example("x", ("y", "z"), weight=2), PAIRS, "the weight 2, which on"),
        (lambda r: Example(completions=("y", "z")), PAIRS, "no prompt, which is nee"),
        (lambda r: Example("x", ("y",), system="z"), {}, "message 'z', which is a tex"),
        (lambda r: Example("x", ("y",), tools=[{}]), {}, "tools, which only chats hav"),
        (lambda r: Example(None, ("x",)), {}, "record 1: field 'prompt' is None"),
        (lambda r: Example("x", ("",)), {}, "completion 'answer' is empty"),
        (lambda r: Example("x", ([ASK],)), {}, "'prompt' is 'x', not a list of messag"),
    ],
)
def test_a_record_that_is_not_converted_is_named(run, convert, options, message):
    register_format("mine", convert, **options)
    objective = {"preference": "dpo", "unpaired": "kto"}.get(options.get("gives"))
    job = {} if objective is None else {"objective": objective}
    with pytest.raises(DataError, match=rf"records\.jsonl: .*{message}"):
        run([{"a": "x"}], data={"kind": "mine"}, **job)


@pytest.mark.parametrize(
    ("name", "gives", "message"),
    [
        ("My form", "completion", "must be lower-case letters, digits and '_'"),
        ("auto", "completion", "is taken: there are auto, prompt_completion, mess"),
        ("alpaca", "completion", "Choose another name; a format is registered once"),
        ("mine", "distill", "must be one of completion, preference, unpaired"),
    ],
)
def test_formats_that_are_refused(name, gives, message):
    before = list(FORMATS)
    with pytest.raises(ConfigError, match=message):
        register_format(name, pair, gives=gives)
    assert before == FORMATS


@pytest.mark.parametrize("given", [{"convert": "dialog"}, {"fits": "x"}])
def test_what_is_no_function_is_refused(given):
    # The checks of types in tests would refuse it first.
    register = inspect.unwrap(register_format)
    with pytest.raises(ConfigError, match="and must be a function of a record"):
        register("mine", **{"convert": pair, **given})


def test_kinds_that_are_refused(run):
    with pytest.raises(DataError, match=r"data.kind is 'x', and .*register_format"):
        run([{"text": "x"}], data={"kind": "x"})
    register_format("mine", pair, gives="preference")
    with pytest.raises(DataError, match="next_token, which does not learn from"):
        run([{"text": "x"}], data={"kind": "mine"})
    register_format("other", lambda r: Example(completions=(r["a"],)))
    with pytest.raises(DataError, match=r"read as other .*does not use it\. Remove"):
        run([{"a": "x"}], data={"kind": "other", "text": "a"})


def test_tokens_of_a_function_are_not_kept(tmp_path, make_tokenizer):
    """The cache does not know what the function does."""
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"a": "x"}) + "\n")
    job = LoraJob(name="job", data=DataConfig(path=str(path), kind="mine"))
    found = []
    for text in "ab":
        register_format("mine", lambda r, text=text: Example(completions=(text,)))
        reader = DataReader(make_tokenizer(), TokenCache(tmp_path / "cache"))
        found.append(reader.read(job).fingerprint)
        FORMATS.pop()
    assert found[0] != found[1]


def test_the_example_of_the_documentation_is_registered(run):
    lines = register_format.__doc__.splitlines()
    text = "\n".join(line[8:] for line in lines if line.startswith(" " * 8))
    exec(text.split("data = ")[0], {"jaxlora": jaxlora})
    found = run([{"turns": ["How? ", "What?", "So."]}], data={"kind": "turns"})
    again = run([{"prompt": "How? ", "completion": "So."}])
    assert found.fingerprint == again.fingerprint
