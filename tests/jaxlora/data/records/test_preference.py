"""Tests that records of preferences are named as such, and can be used on request."""

import json

import pytest

from jaxlora.data.records.preference import describe_preference
from jaxlora.errors import DataError

ASKED = [{"role": "user", "content": "Hi"}]
GOOD = [{"role": "assistant", "content": "Hello!"}]
BAD = [{"role": "assistant", "content": "Go away."}]
SPOKEN = [{"from": "human", "value": "Hi"}]
ALPACA = {"instruction": "Greet.", "input": ""}

RECORDS = {
    "TRL": {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."},
    "TRL, messages": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "TRL, no prompt": {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
    "TRL, no prompt, text": {"chosen": "Hi Hello!", "rejected": "Hi Go away."},
    "with messages too": {
        "prompt": "Hi",
        "chosen": ASKED + GOOD,
        "rejected": ASKED + BAD,
        "messages": ASKED + GOOD,
    },
    "TRL, KTO": {"prompt": "Hi", "completion": "Go away.", "label": False},
    "TRL, KTO, messages": {"prompt": ASKED, "completion": GOOD, "label": True},
    "TRL, steps": {"prompt": "Hi", "completions": ["a", "b"], "labels": [True, False]},
    "LLaMA-Factory": ALPACA | {"chosen": "Hello!", "rejected": "Go away."},
    "LLaMA-Factory, old": ALPACA | {"output": ["Hello!", "Go away."]},
    "LLaMA-Factory, KTO": ALPACA | {"output": "Hello!", "kto_tag": True},
    "LLaMA-Factory, ShareGPT": {
        "conversations": SPOKEN,
        "chosen": {"from": "gpt", "value": "Hello!"},
        "rejected": {"from": "gpt", "value": "Go away."},
    },
    "LLaMA-Factory, OpenAI, KTO": {"messages": ASKED + GOOD, "label": False},
    "Axolotl": {"question": "Hi", "chosen_response": "a", "rejected_response": "b"},
    "OpenAI": {
        "input": {"messages": ASKED},
        "preferred_output": GOOD,
        "non_preferred_output": BAD,
    },
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_preference_record_is_named(run, record):
    match = r"this is a preference record .*objective"
    with pytest.raises(DataError, match=match):
        run([record] * 2)


def test_a_preference_record_among_others_is_named(run):
    pair = {"prompt": "Hi", "completion": "Hello!"}
    with pytest.raises(DataError, match=r"record 2: this is a preference record"):
        run([pair, RECORDS["TRL"]])
    with pytest.raises(DataError, match=r"this is a preference record"):
        run([RECORDS["TRL"]], data={"kind": "prompt_completion"})


def test_columns_hold_preferences_too(run):
    rows = [{"prompt": "Hi", "completion": "Hello!", "label": True}] * 2
    with pytest.raises(DataError, match="this is a preference record"):
        run(rows, suffix=".parquet")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("TRL", {"completion": "chosen"}),
        ("TRL, messages", {"completion": "chosen"}),
        ("TRL, no prompt", {"messages": "chosen"}),
        ("TRL, no prompt, text", {"text": "chosen"}),
        ("with messages too", {"kind": "messages"}),
        ("with messages too", {"messages": "chosen"}),
        ("TRL, KTO", {"kind": "prompt_completion"}),
        ("LLaMA-Factory", {"prompt": "instruction", "completion": "chosen"}),
    ],
)
def test_the_better_answers_are_used_on_request(run, name, data):
    assert len(run([RECORDS[name]], data=data).samples) == 1


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("TRL", "set data.completion to 'chosen'."),
        ("TRL, messages", "set data.completion to 'chosen'."),
        ("TRL, no prompt", "set data.messages to 'chosen'."),
        ("TRL, no prompt, text", "set data.text to 'chosen'."),
        ("with messages too", "set data.messages to 'chosen'."),
        ("LLaMA-Factory", "to 'chosen', and data.prompt to the prompt's field."),
        ("TRL, KTO", "set data.kind to train on all of them."),
    ],
)
def test_the_cure_fits_the_record(name, cure):
    assert cure in (describe_preference(RECORDS[name]) or "")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "completion": "Hello!", "label": 1},
        {"text": "Hi", "label": True},
        {"messages": ASKED + GOOD, "label": "greeting", "chosen": True},
        {"prompt": "Was it rejected?", "completion": "no", "rejected": False},
        ALPACA | {"output": "Hello!", "labels": json.dumps([1])},
    ],
)
def test_other_records_are_no_preferences(run, record):
    assert describe_preference(record) is None
    assert len(run([record]).samples) == 1
