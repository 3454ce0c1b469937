"""Records of preferences become pairs: TRL's formats, and those of other tools."""

import numpy as np
import pytest

from jaxlora.errors import DataError
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.records.test_preference import (
    ALPACA,
    ASKED,
    BAD,
    GOOD,
    RECORDS,
    SPOKEN,
)

CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[{}<|im_end|>]]\n"
CHATS = [CHAT.format("Hello!"), CHAT.format("Go away.")]
TEXTS = ["Hi[[Hello!</s>]]", "Hi[[Go away.</s>]]"]


@pytest.fixture
def pairs(run, make_tokenizer):
    """The texts of pairs, with [[ ]] around what is trained on, and their data."""

    def pairs(records, **options):
        tokenizer = make_tokenizer(chat_templates.CHATML)
        options = {"objective": "simpo"} | options
        data = run(records, tokenizer, **options)
        return [chat_templates.shown(tokenizer, s) for s in data.samples], data

    return pairs


@pytest.mark.parametrize(
    ("record", "data", "wanted"),
    [
        (RECORDS["TRL"], {}, TEXTS),
        (RECORDS["TRL"], {"chat": True}, CHATS),
        (RECORDS["TRL, messages"], {}, CHATS),
        (RECORDS["TRL, no prompt"], {}, CHATS),
        # As in TRL, the space before an answer is the answer's.
        (
            RECORDS["TRL, no prompt, text"],
            {},
            ["Hi[[ Hello!</s>]]", "Hi[[ Go away.</s>]]"],
        ),
        (RECORDS["with messages too"], {}, CHATS),
        (RECORDS["LLaMA-Factory, ShareGPT"], {}, CHATS),
        (
            RECORDS["LLaMA-Factory"],
            {"prompt": "{{ instruction }}{{ input }}"},
            ["Greet.[[Hello!</s>]]", "Greet.[[Go away.</s>]]"],
        ),
        (
            RECORDS["Axolotl"],
            {
                "prompt": "question",
                "chosen": "chosen_response",
                "rejected": "rejected_response",
            },
            ["Hi[[a</s>]]", "Hi[[b</s>]]"],
        ),
        (
            RECORDS["OpenAI"],
            {
                "kind": "preference",
                "prompt": "{{ input.messages[0].content }}",
                "chosen": "{{ preferred_output[0].content }}",
                "rejected": "{{ non_preferred_output[0].content }}",
            },
            TEXTS,
        ),
    ],
)
def test_a_record_becomes_a_pair(pairs, record, data, wanted):
    texts, found = pairs([record], data=data)
    assert texts == wanted
    assert found.group_size == 2
    assert found.num_records == 1


def test_conversations_before_the_answers_are_not_trained_on(pairs):
    asked = [*ASKED, *GOOD, {"role": "user", "content": "Bye"}]
    record = {"chosen": asked + GOOD, "rejected": asked + BAD}
    texts, _ = pairs([record])
    assert all(text.count("[[") == 1 for text in texts)
    explicit, _ = pairs([{"prompt": asked, "chosen": GOOD, "rejected": BAD}])
    assert texts == explicit


def test_pairs_are_dropped_and_held_out_whole(pairs):
    rng = np.random.default_rng(5)

    def text() -> str:
        return "".join(rng.choice(list("abc "), rng.integers(1, 30)))

    records = [
        {"prompt": f"{i}: ", "chosen": f"{text()}.", "rejected": f"{text()}!"}
        for i in range(20)
    ]
    whole, data = pairs(records)
    assert len(whole) == 40
    assert data.num_records == 20
    held = {"eval_fraction": 0.25, "eval_seed": 3}
    train, _ = pairs(records, **held)
    evaluated, _ = pairs(records, which="eval", **held)
    assert (len(train), len(evaluated)) == (30, 10)
    assert sorted(train + evaluated) == sorted(whole)
    for texts in (train, evaluated):
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            assert chosen.partition("[[")[0] == rejected.partition("[[")[0]
    lengths = data.lengths
    limit = int(np.sort(lengths)[30])
    fit = int((data.lengths.reshape(-1, 2).max(axis=1) <= limit).sum())
    few, dropped = pairs(records, max_length=limit, too_long="drop")
    assert len(few) == 2 * fit
    assert dropped.num_dropped == 20 - fit
    with pytest.raises(DataError, match=r"record [0-9]+ has .* than max_length"):
        pairs(records, max_length=limit, too_long="error")
    # Nothing is left of an answer that begins beyond the end.
    none = {"prompt": "a" * 99, "chosen": "b", "rejected": "c"}
    few, data = pairs([*records, none], max_length=60)
    assert len(few) == 40
    assert data.num_without_target == 1


HUMAN = "\n\nHuman: Hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (f"{HUMAN} Yes", f"{HUMAN} Yes, but", HUMAN),
        (f"{HUMAN} Yes, but", f"{HUMAN} Yes", HUMAN),
        (f"{HUMAN} Yes", f"{HUMAN} Yes\n\nHuman: Why?\n\nAssistant: So.", HUMAN),
        (f"{HUMAN} The answer: 4", f"{HUMAN} The answer: 4.", HUMAN),
        ("Q: Hi A: Yes", "Q: Hi A: Yes, but", "Q: Hi A:"),
        ("USER: Hi ASSISTANT: Yes", "USER: Hi ASSISTANT: Yes.", "USER: Hi ASSISTANT:"),
        ("Ann: Hi\nTom: Yes", "Ann: Hi\nTom: Yes.", "Ann: Hi\nTom:"),
        ("### Response:\nYes", "### Response:\nYes.", "### Response:\n"),
        ("[INST] Hi [/INST] Yes", "[INST] Hi [/INST] Yes.", "[INST] Hi [/INST]"),
    ],
)
def test_an_answer_may_begin_the_other(pairs, chosen, rejected, prompt):
    texts, _ = pairs([{"chosen": chosen, "rejected": rejected}])
    assert texts == [
        f"{prompt}[[{answer.removeprefix(prompt)}</s>]]"
        for answer in (chosen, rejected)
    ]


def test_a_conversation_may_begin_the_other(pairs):
    longer = [*ASKED, *GOOD, *ASKED, *BAD]
    texts, _ = pairs([{"chosen": longer, "rejected": [*ASKED, *GOOD]}])
    assert texts[0].startswith(texts[1].removesuffix("\n"))
    assert [text.count("[[") for text in texts] == [2, 1]


@pytest.mark.parametrize("good", [1, 1.0, "1", "true", True])
@pytest.mark.parametrize("bad", [0, 0.0, "0", "False", False])
def test_labels_may_be_numbers(pairs, good, bad):
    record = {"prompt": "a", "completion": "b"}
    records = [record | {"label": label} for label in (good, bad)]
    _, data = pairs(records, objective="kto")
    assert [s.value for s in data.samples] == [1.0, 0.0]


def test_a_bad_record_is_named_and_dropped_whole(pairs):
    bad = RECORDS["TRL"] | {"rejected": None}
    with pytest.raises(DataError, match="record 2: field 'rejected' is None"):
        pairs([RECORDS["TRL"], bad])
    records = [RECORDS["TRL"], bad, RECORDS["TRL"]]
    texts, data = pairs(records, data={"bad_records": "drop"})
    assert texts == TEXTS * 2
    assert data.num_bad == 1


@pytest.mark.parametrize(
    ("record", "data", "match"),
    [
        ({"prompt": "a", "completion": "b"}, {}, "'chosen' is missing"),
        ({"prompt": "a", "chosen": "b"}, {}, "'rejected' is missing"),
        ({"chosen": "a", "rejected": "b"}, {}, "do not begin with the same prompt"),
        (
            {"prompt": "a", "chosen": {"text": "b"}, "rejected": {"text": "c"}},
            {},
            'template: "{{ chosen.text }}"',
        ),
        ({"prompt": "a", "chosen": ["b"], "rejected": ["c"]}, {}, r"{{ chosen\[0\] }}"),
        ({"chosen": "a", "rejected": "a"}, {}, "both answers are the same"),
        ({"chosen": "ab", "rejected": "a"}, {}, "the same prompt and the same speaker"),
        ({"chosen": "Q: a A:", "rejected": "Q: a A: b"}, {}, "'chosen' is empty"),
        ({"chosen": "a", "rejected": GOOD}, {}, "two texts, or two lists"),
        ({"chosen": "ab", "rejected": "ac"}, {"chat": True}, "no field 'prompt'"),
        (RECORDS["TRL"], {"loss_on": "all"}, "trains on prompts"),
        (RECORDS["TRL"], {"prompt": "question"}, "'question', is missing"),
        (RECORDS["TRL"], {"completion": "chosen"}, "which does not use it"),
        (RECORDS["TRL"], {"kind": "text"}, "not learn from records of the kind text"),
        (ALPACA | {"chosen": SPOKEN[0], "rejected": 1}, {}, "field of the prompt"),
    ],
)
def test_what_is_no_pair_is_refused(pairs, record, data, match):
    with pytest.raises(DataError, match=match):
        pairs([record], data=data)


def test_other_objectives_take_neither_pairs_nor_labels(pairs):
    data = {"kind": "preference"}
    with pytest.raises(DataError, match="next_token, which does not learn from"):
        pairs([RECORDS["TRL"]], data=data, objective="next_token")
    with pytest.raises(DataError, match="simpo, which does not learn from records"):
        pairs([RECORDS["TRL, KTO"]], data={"kind": "unpaired"}, objective="simpo")


@pytest.mark.parametrize(
    ("record", "data", "text"),
    [
        (RECORDS["TRL, KTO"], {}, "Hi[[Go away.</s>]]"),
        (RECORDS["TRL, KTO"], {"chat": True}, CHATS[1]),
        (RECORDS["TRL, KTO, messages"], {}, CHATS[0]),
        (RECORDS["LLaMA-Factory, OpenAI, KTO"], {}, CHATS[0]),
        (
            {
                "conversations": [*SPOKEN, {"from": "gpt", "value": "a"}],
                "kto_tag": True,
            },
            {},
            CHAT.format("a"),
        ),
        (
            {"question": "Hi", "completion": "a", "good": "False"},
            {"prompt": "question", "label": "good"},
            "Hi[[a</s>]]",
        ),
    ],
)
def test_a_record_with_a_label_becomes_a_sample(pairs, record, data, text):
    texts, found = pairs([record], data=data, objective="kto")
    assert texts == [text]
    label = next(record[k] for k in ("label", "kto_tag", "good") if k in record)
    assert found.samples[0].value == (label is True)
    assert [s.value for s in found.samples] == [label is True]
    assert found.group_size == 1


def test_only_the_last_answer_of_a_labelled_conversation_is_trained_on(pairs):
    said = [*ASKED, *GOOD, {"role": "user", "content": "Bye"}, *BAD]
    texts, _ = pairs([{"messages": said, "label": False}], objective="kto")
    assert texts[0].count("[[") == 1
    assert "Go away.<|im_end|>]]" in texts[0]


def test_pairs_are_taken_apart_for_labels(pairs):
    """As TRL does: the chosen answers of many pairs, then their rejected ones."""
    records = [
        {"prompt": f"{i}: ", "chosen": f"{i}+", "rejected": f"{i}-"}
        for i in range(1200)
    ]
    texts, data = pairs(records, objective="kto")
    blocks = (range(1000), range(1000, 1200))
    wanted = [f"{i}: [[{i}{s}</s>]]" for some in blocks for s in "+-" for i in some]
    assert texts == wanted
    assert [s.value for s in data.samples] == ["+" in text for text in wanted]
    assert (data.group_size, data.num_records) == (1, 2400)
    paired, both = pairs(records)
    assert sorted(paired) == sorted(texts)
    assert both.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("record", "data", "match"),
    [
        ({"prompt": "a", "completion": "b"}, {}, "'label' is missing"),
        ({"text": "a", "label": True}, {}, "without a prompt"),
        ({"prompt": "a", "completion": "b", "label": 0.5}, {}, "'label' is 0.5"),
        ({"messages": GOOD, "label": True}, {}, "ends with the labelled answer"),
        (RECORDS["TRL, KTO"], {"loss_on": "all"}, "prompts, which have no label"),
        (RECORDS["TRL, KTO"], {"kind": "messages"}, "not learn from records of the"),
    ],
)
def test_what_has_no_label_is_refused(pairs, record, data, match):
    with pytest.raises(DataError, match=match):
        pairs([record], data=data, objective="kto")


def test_margins_of_pairs(pairs):
    one, other = (RECORDS["TRL"] | {"margin": value} for value in (2, 0.5))
    _, data = pairs([one, other], objective="reward")
    assert [s.value for s in data.samples] == [2.0, 0.0, 0.5, 0.0]
    named = [{**RECORDS["TRL"], "gap": 3.0}]
    _, data = pairs(named, objective="reward", data={"margin": "gap"})
    assert data.samples[0].value == 3.0
    _, data = pairs([RECORDS["TRL"]], objective="reward")
    assert data.samples[0].value == 0.0
    with pytest.raises(DataError, match="record 2: the margin 'margin' is None"):
        pairs([one, RECORDS["TRL"]], objective="reward")
    with pytest.raises(DataError, match=r"data.margin 'gap', which objective simpo"):
        pairs(named, data={"margin": "gap"})


def test_the_longest_recombined_sample_is_bounded(pairs):
    records = [
        {"prompt": "a" * 20, "completion": "b", "label": True},
        {"prompt": "a", "completion": "b" * 20, "label": False},
    ]
    _, data = pairs(records, objective="kto")
    whole = data.samples[0].prompt_length + len(data.samples[1].token_ids) - 1
    assert data.longest_sample == data.longest_group == whole > data.lengths.max()
    _, data = pairs(records, objective="kto", max_length=24)
    assert data.longest_sample == 24


def test_answers_that_are_rendered_alike_are_a_bad_record(run, make_tokenizer):
    """The template leaves out how they differ, or they do not differ at all."""
    simpo = {"objective": "simpo"}
    strict = make_tokenizer(chat_templates.LLAMA3)
    differs = {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}
    for chosen, rejected, tokenizer in (
        ([{"role": "assistant", "content": "Yes."}], " Yes. ", strict),
        ([{"role": "assistant", "content": "Yes."}], "Yes.", strict),
    ):
        other = [{"role": "assistant", "content": rejected}]
        record = {"prompt": ASKED, "chosen": chosen, "rejected": other}
        with pytest.raises(DataError, match="record 1: both answers are the same text"):
            run([record], tokenizer, **simpo)
        drop = {"bad_records": "drop"}
        kept = run([record, differs], tokenizer, data=drop, **simpo)
        assert (len(kept.samples), kept.num_bad) == (2, 1)
    thoughts = [
        [{"role": "assistant", "content": f"<think>{one}</think>Yes."}] for one in "ab"
    ]
    record = {"prompt": ASKED, "chosen": thoughts[0], "rejected": thoughts[1]}
    with pytest.raises(DataError, match="does not print the text 'a' of message"):
        run([record], make_tokenizer(chat_templates.R1), **simpo)
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    with pytest.raises(DataError, match="both answers are the same text"):
        run([same], **simpo)
