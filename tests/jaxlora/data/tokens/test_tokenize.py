import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.tokens import encode_records, tokenize
from jaxlora.data.tokens.boundary import BoundaryEncoder
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import DataError
from jaxlora.generate.prompt import Prompt, prompt_ids
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import TALK

PAIR = {"prompt": "How are you? ", "completion": "Fine."}


def show(tokenizer, sample) -> list[tuple[bool, str]]:
    """A sample as runs of text with and without loss."""
    runs: list[tuple[bool, list[int]]] = []
    for token, target in zip(sample.token_ids, sample.is_target, strict=True):
        if not runs or runs[-1][0] != target:
            runs.append((bool(target), []))
        runs[-1][1].append(int(token))
    return [(target, tokenizer.decode(ids)) for target, ids in runs]


# --- Prompt and completion ---------------------------------------------------


PLAIN = {"append_eos": False}
CHAT = {"chat": True, "system": "Be brief."}
IN_CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    "How are you? <|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("record", "around", "data", "expected"),
    [
        (PAIR, "$A", {}, ["How are you? ", "Fine.</s>"]),
        (PAIR, "<s> $A", {}, ["<s>How are you? ", "Fine.</s>"]),
        (PAIR, "<s> $A </s>", {}, ["<s>How are you? ", "Fine.</s>"]),
        (PAIR, "<s> $A", PLAIN | {"loss_on": "all"}, ["<s>", "How are you? Fine."]),
        ({"prompt": "a", "completion": "b</s>"}, "$A", {}, ["a", "b</s>"]),
        # No token predicts the first one.
        ({"prompt": "", "completion": "xyz"}, "$A", {}, ["x", "yz</s>"]),
        (PAIR, "$A", CHAT, [IN_CHATML, "Fine.<|im_end|>", "\n"]),
        ({"text": "xyz"}, "$A", {}, ["x", "yz</s>"]),
        ({"text": "xyz"}, "<s> $A", {}, ["<s>", "xyz</s>"]),
        ({"text": "xyz"}, "<s> $A", PLAIN, ["<s>", "xyz"]),
        ({"text": "xyz"}, "<s> $A </s>", {}, ["<s>", "xyz</s>"]),
        ({"text": "xyz"}, "<s> $A </s>", PLAIN, ["<s>", "xyz</s>"]),
    ],
)
def test_what_is_trained_on(run, make_tokenizer, record, around, data, expected):
    """Parts that are context and parts that are trained on, in turn."""
    tokenizer = make_tokenizer(around=around)
    (sample,) = run([record], tokenizer, data=data).samples
    flags = itertools.cycle([False, True])
    assert show(tokenizer, sample) == list(zip(flags, expected, strict=False))
    assert sample.token_ids.dtype == np.int32
    assert sample.is_target.dtype == np.bool_


def test_templates_over_fields(run, make_tokenizer):
    data = {
        "prompt": "Q: {{ q }}{% if hint %} ({{ hint }}){% endif %}\n",
        "completion": "{{ answers[0] }}",
    }
    records = [
        {"q": "1+1?", "answers": [2], "hint": "even", "text": "x"},
        {"q": "é", "answers": ["e"], "hint": None, "text": "x"},
    ]
    shown = [show(make_tokenizer(), s) for s in run(records, data=data).samples]
    assert shown == [
        [(False, "Q: 1+1? (even)\n"), (True, "2</s>")],
        [(False, "Q: é\n"), (True, "e</s>")],
    ]


def test_chat_wraps_a_pair(run, make_tokenizer):
    options = {"chat": True, "system": "Be brief."}
    (sample,) = run([PAIR], data=options).samples
    assert show(make_tokenizer(), sample) == [
        (
            False,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
            "How are you? <|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "Fine.<|im_end|>"),
        (False, "\n"),
    ]


# --- Messages ----------------------------------------------------------------

EVERY_TEMPLATE = {
    "smollm2": (chat_templates.SMOLLM2, ["Hello!<|im_end|>", "Fine.\n<|im_end|>"]),
    "chatml": (chat_templates.CHATML, ["Hello!<|im_end|>", "Fine.\n<|im_end|>"]),
    "llama3": (chat_templates.LLAMA3, ["Hello!<|eot_id|>", "Fine.<|eot_id|>"]),
    "mistral": (chat_templates.MISTRAL, ["Hello!</s>", "Fine.\n</s>"]),
    "reasoning": (
        chat_templates.REASONING,
        ["Hello!<|im_end|>", "Fine.\n<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", EVERY_TEMPLATE)
def test_answers_with_their_ends_are_targets(run, make_tokenizer, name):
    template, answers = EVERY_TEMPLATE[name]
    tokenizer = make_tokenizer(template, around="<s> $A")
    (sample,) = run([{"messages": TALK}], tokenizer).samples
    shown = show(tokenizer, sample)
    assert [text for target, text in shown if target] == answers
    # No second <s>: the template writes its own.
    assert "".join(text for _, text in shown) == tokenizer.chat.render(TALK)


def test_loss_on_all_of_a_chat(run, make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.CHATML)
    (sample,) = run(
        [{"messages": TALK[:1]}], tokenizer, data={"loss_on": "all"}
    ).samples
    assert not sample.is_target[0] and sample.is_target[1:].all()
    assert tokenizer.decode(sample.token_ids) == tokenizer.chat.render(TALK[:1])


def test_from_and_value(run, make_tokenizer):
    talk = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "How?"},
        {"from": "gpt", "value": "Fine."},
    ]
    (sample,) = run(
        [{"conversations": talk}], data={"messages": "conversations"}
    ).samples
    tokenizer = make_tokenizer()
    assert show(tokenizer, sample)[1] == (True, "Fine.<|im_end|>")
    assert "user\nHow?" in tokenizer.decode(sample.token_ids)
    assert "system\nBe brief." in tokenizer.decode(sample.token_ids)


def test_absent_keys_of_columnar_files_are_absent(tmp_path, make_tokenizer):
    call = {"function": {"name": "f", "arguments": "{}"}}
    talk = [*TALK[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist([{"messages": talk + TALK[2:]}])
    pyarrow.parquet.write_table(table, path)
    tokenizer = make_tokenizer(chat_templates.LLAMA3)
    job = LoraJob(name="job", data=DataConfig(path=str(path)))
    (sample,) = DataReader(tokenizer).read(job).samples
    assert [text for target, text in show(tokenizer, sample) if target] == [
        '{"name": "f", "arguments": {}}<|eot_id|>',
        "Fine.<|eot_id|>",
    ]


texts = st.text(st.sampled_from("ab \n🙂é<|im_end|>.\t"), min_size=1, max_size=12)


def test_targets_of_any_conversation(run, make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.CHATML)

    # The machine may be busy, so there is no deadline.
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
    def check(talk):
        messages, answers = [], []
        for question, answer in talk:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
            answers.append(f"{answer}<|im_end|>")
        (sample,) = run([{"messages": messages}], tokenizer).samples
        shown = show(tokenizer, sample)
        assert [text for target, text in shown if target] == answers

    check()


def test_template_that_prints_something_new_before_the_messages(run, make_tokenizer):
    tokenizer = make_tokenizer("{{ messages|length }}" + chat_templates.CHATML)
    (sample,) = run([{"messages": TALK}], tokenizer).samples
    shown = show(tokenizer, sample)
    answers = ["Hello!<|im_end|>", "Fine.\n<|im_end|>"]
    assert [text for target, text in shown if target] == answers


def test_generation_prompt_that_is_not_a_prefix(run, make_tokenizer):
    template = chat_templates.CHATML.replace("assistant\\n' }}", "model\\n' }}")
    match = (
        r"record 1: the turn of message 1 \(assistant\) is unclear: its turn begins "
        r"with .*assistant\\n', but the generation prompt is .*model\\n'\. Set data.lo"
    )
    with pytest.raises(DataError, match=match):
        run([{"messages": TALK[:2]}], make_tokenizer(template))
    options = {"loss_on": "all"}
    assert run([{"messages": TALK}], make_tokenizer(template), data=options).samples


# --- Text that was rendered before ---------------------------------------------------

RENDERED = [
    # The text, the special tokens around any text, and the text of the sample.
    ("<s>xyz", "<s> $A", "<s>xyz</s>"),
    ("<s><s>xyz", "<s> $A", "<s><s>xyz</s>"),
    ("<s>xyz", "$A", "<s>xyz</s>"),
    ("<s>xyz</s>", "<s> $A </s>", "<s>xyz</s>"),
    ("xyz</s>\n", "<s> $A", "<s>xyz</s>\n"),
    ("<s>xyz<|im_end|>", "<s> $A", "<s>xyz<|im_end|>"),
    ("xyz<|im_end|>\n", "<s> $A </s>", "<s>xyz<|im_end|>\n"),
    ("<|im_start|>xyz", "<|im_start|> $A", "<|im_start|>xyz</s>"),
    ("xyz<pad>", "<s> $A", "<s>xyz<pad></s>"),
]


@pytest.mark.parametrize(("text", "around", "expected"), RENDERED)
def test_a_rendered_text_has_one_start_and_one_end(
    run, make_tokenizer, text, around, expected
):
    tokenizer = make_tokenizer(around=around)
    (sample,) = run([{"text": text}], tokenizer).samples
    assert tokenizer.decode(sample.token_ids) == expected
    assert sample.is_target.tolist() == [False] + [True] * (len(sample.token_ids) - 1)


@pytest.mark.parametrize("marks_start", [False, True])
@pytest.mark.parametrize("loss_on", ["completion", "all"])
@pytest.mark.parametrize(("text", "around", "expected"), RENDERED)
def test_a_rendered_pair_has_one_start_and_one_end(
    run, make_tokenizer, monkeypatch, text, around, expected, loss_on, marks_start
):
    tokenizer = make_tokenizer(around=around)
    monkeypatch.setattr(BoundaryEncoder, "_does_mark_start", lambda self: marks_start)
    middle, data = text.index("y"), {"loss_on": loss_on}
    pair = {"prompt": text[:middle], "completion": text[middle:]}
    (sample,) = run([pair], tokenizer, data=data).samples
    assert tokenizer.decode(sample.token_ids) == expected
    first = expected.index("y") if loss_on == "completion" else 0
    learned = tokenizer.decode(sample.token_ids[sample.is_target])
    assert learned == expected[first:].removeprefix("<s>").removeprefix("<|im_start|>")
    (sample,) = run([{"prompt": "", "completion": text}], tokenizer, data=data).samples
    assert tokenizer.decode(sample.token_ids) == expected


@pytest.mark.parametrize(("text", "around", "expected"), RENDERED)
def test_a_prompt_of_generation_has_one_start(make_tokenizer, text, around, expected):
    tokenizer = make_tokenizer(around=around)
    ids = prompt_ids(Prompt(text), tokenizer, 512)
    assert tokenizer.decode(ids) == expected.removesuffix("</s>") + (
        "</s>" if text.endswith("</s>") else ""
    )


def test_empty_texts_are_counted(run):
    result = run([{"text": ""}, {"text": "xyz"}, {"text": ""}])
    assert len(result.samples) == 1
    assert (result.num_records, result.num_without_target) == (3, 2)


# --- Length ------------------------------------------------------------------

LENGTHS = [{"prompt": "zz", "completion": "z" * n} for n in (1, 7, 3, 20)]
LATE = {"prompt": "z" * 9, "completion": "z"}


def test_truncate(run):
    result = run([*LENGTHS, LATE], max_length=6)
    assert [len(s.token_ids) for s in result.samples] == [4, 6, 6, 6]
    assert [len(s.is_target) for s in result.samples] == [4, 6, 6, 6]
    assert (result.num_records, result.num_truncated) == (5, 2)
    assert (result.num_dropped, result.num_without_target) == (0, 1)
    assert (result.num_tokens, result.num_target_tokens) == (22, 14)
    assert result.summary().endswith(
        "records.jsonl: 4 samples, 22 tokens, 14 of them to predict; 2 of 5 samples "
        "were longer than max_length=6: truncated; 1 of 5 samples was without a token "
        "to predict: dropped."
    )


def test_mean_tokens_of_a_batch(run):
    data = run(LENGTHS)
    assert data.lengths.tolist() == [4, 10, 6, 23]
    means = [data.mean_batch_tokens(size) for size in (1, 2, 4, 100)]
    assert means == [10.75, 21.5, 43, 43]


def test_drop(run):
    result = run(LENGTHS, max_length=6, too_long="drop")
    assert [len(s.token_ids) for s in result.samples] == [4, 6]
    assert (result.num_truncated, result.num_dropped) == (0, 2)
    assert result.summary().endswith(
        "2 of 4 samples were longer than max_length=6: dropped."
    )


def test_nothing_is_too_long(run):
    result = run(LENGTHS, max_length=23, too_long="error")
    assert "max_length" not in result.summary()


LONG = "z" * 300_000


@pytest.mark.parametrize(
    "record",
    [{"prompt": LONG, "completion": "z"}, {"prompt": "z", "completion": LONG}],
)
def test_a_long_text_is_cut_dropped_or_refused(run, record):
    records = [*LENGTHS[:2], record]
    found = run(records, max_length=12)
    assert found.num_truncated + found.num_without_target == 1
    for sample in found.samples[2:]:
        assert len(sample.token_ids) == 12 and len(set(sample.token_ids)) == 1
    dropped = run(records, max_length=12, too_long="drop")
    assert (dropped.num_dropped, len(dropped.samples)) == (1, 2)
    with pytest.raises(
        DataError, match="record 3 has 300002 tokens, more than max_length=12"
    ):
        run(records, max_length=12, too_long="error")


def test_a_truncated_chat_has_the_targets_of_the_complete_one(run, make_tokenizer):
    talk = TALK + [{"role": m["role"], "content": LONG} for m in TALK[-2:]] + TALK
    tokenizer = make_tokenizer(chat_templates.CHATML)
    (whole,) = run([{"messages": talk}], tokenizer, max_length=2_000_000).samples
    for length in (60, 100, 200):
        records = [{"messages": talk}]
        (sample,) = run(records, tokenizer, max_length=length).samples
        np.testing.assert_array_equal(sample.token_ids, whole.token_ids[:length])
        np.testing.assert_array_equal(sample.is_target, whole.is_target[:length])


def test_progress_is_logged(run, monkeypatch, caplog):
    monkeypatch.setattr(encode_records, "_LOG_RECORDS", 1000)
    monkeypatch.setattr(encode_records, "_CHUNK_RECORDS", 500)
    with caplog.at_level("INFO", logger="jaxlora"):
        run([{"text": "abc"}] * 2300)
    lines = [r.getMessage() for r in caplog.records[:-1]]
    assert [line.split("jsonl: ")[1] for line in lines] == [
        "1,000 records read so far, 4,000 tokens",
        "2,000 records read so far, 8,000 tokens",
    ]


def test_progress_is_logged_at_intervals(run, monkeypatch, caplog):
    monkeypatch.setattr(encode_records, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(encode_records, "_CHUNK_CHARS", 2)
    with caplog.at_level("INFO", logger="jaxlora"):
        run([{"text": "abc"}] * 3)
    assert len(caplog.records) == 3 + 1  # the last one says how they were read


# --- Held-out records --------------------------------------------------------

NUMBERED = [{"text": f"number {i}"} for i in range(41)]


def texts_of(result, tokenizer):
    return [tokenizer.decode(s.token_ids) for s in result.samples]


def test_held_out_records(run, make_tokenizer):
    tokenizer = make_tokenizer()

    def side(which, **seeds):
        result = run(NUMBERED, tokenizer, which, eval_fraction=0.1, **seeds)
        assert result.num_records == len(result.samples)
        return texts_of(result, tokenizer)

    train, held_out = side("train"), side("eval")
    assert (len(train), len(held_out)) == (36, 5)
    everything = [f"{r['text']}</s>" for r in NUMBERED]
    assert sorted(train + held_out) == sorted(everything)
    assert train == [t for t in everything if t in train]
    assert side("eval") == held_out
    assert side("eval", seed=1) == held_out
    assert side("eval", eval_seed=1) != held_out


def test_share_is_rounded_up_but_not_by_floats(run):
    records = NUMBERED[:10] * 10
    assert run(records, which="eval", eval_fraction=0.07).num_records == 7
    assert run(records, which="eval", eval_fraction=0.001).num_records == 1


def test_held_out_records_that_are_trained_on_are_counted(run):
    records = [*NUMBERED[:10], *NUMBERED[:1] * 10]
    options = {"eval_fraction": 0.5, "eval_seed": 1}
    train, held = (run(records, which=which, **options) for which in ("train", "eval"))
    numbers = [[s.token_ids.tobytes() for s in data.samples] for data in (train, held)]
    num = sum(one in numbers[0] for one in numbers[1])
    assert 1 < num < 10
    said = f"{num} of 10 held-out records are also in the training data."
    assert held.describe_shared(train) == said
    assert (
        run(NUMBERED, which="eval", **options).describe_shared(run(NUMBERED, **options))
        == ""
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    one, other = (
        run([pair, pair | {"rejected": text}], objective="simpo") for text in "de"
    )
    assert one.describe_shared(other) == (
        "1 of 2 held-out records is also in the training data."
    )


BAD = [*NUMBERED[:5], {"text": 5}, *NUMBERED[6:]]


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (
            LENGTHS,
            {"max_length": 6, "too_long": "error"},
            r"record 2 has 10 tokens, more than max_length=6 of job 'job'\. Raise",
        ),
        (
            LENGTHS,
            {"max_length": 2, "too_long": "drop"},
            "none of 4 records can be used by job 'job': 4 are longer .* and 0 have no",
        ),
        (
            LENGTHS,
            {"max_length": 2},
            "0 are longer than max_length=2, and 4 have no",
        ),
        # The number is that in the file.
        (
            BAD,
            {"eval_fraction": 0.01, "eval_seed": 1},
            "record 6: field 'text' is 5",
        ),
        (
            NUMBERED[:2],
            {"eval_fraction": 1e-10},
            "eval_fraction=1e-10 of 2 records holds out none of them. Use a larger",
        ),
        (
            NUMBERED[:1],
            {"eval_fraction": 0.5},
            "eval_fraction=0.5 of 1 records holds out all of them",
        ),
        (NUMBERED, {"which": "eval"}, "job 'job' has no held-out records"),
    ],
)
def test_records_of_which_nothing_can_be_made(run, records, options, message):
    with pytest.raises(DataError, match=message):
        run(records, **options)


def test_records_that_change_during_reading(run, monkeypatch, tmp_path):
    def change_and_encode(*arguments):
        (tmp_path / "records.jsonl").write_text(json.dumps(PAIR))
        return encode_records.encode_records(*arguments)

    monkeypatch.setattr(tokenize, "encode_records", change_and_encode)
    with pytest.raises(DataError, match=r"records\.jsonl: changed while it was read"):
        run(NUMBERED, eval_fraction=0.1)


def test_eval_data(run, tmp_path, make_tokenizer):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"text": "held out"}\n')
    held_out = DataConfig(path=str(path))
    tokenizer = make_tokenizer()
    result = run(NUMBERED, tokenizer, "eval", eval_data=held_out)
    assert texts_of(result, tokenizer) == ["held out</s>"]
    assert result.source == str(path)
    assert run(NUMBERED, tokenizer, eval_data=held_out).num_records == 41


def test_many_records_keep_their_order(run, make_tokenizer):
    records = [{"text": f"number {i}"} for i in range(2500)]
    tokenizer = make_tokenizer()
    shown = texts_of(run(records, tokenizer), tokenizer)
    assert shown == [f"{r['text']}</s>" for r in records]
