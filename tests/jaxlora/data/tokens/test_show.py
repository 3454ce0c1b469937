"""Tests what `jaxlora data show` prints about a data set."""

import io
import json

import pytest
import tokenizers
from rich.console import Console
from tokenizers import decoders, models, pre_tokenizers

from jaxlora.config import DataConfig
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.show import _token_texts, show_data
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import TALK


@pytest.fixture
def show(tmp_path):
    """Prints records; `color` as in a terminal."""

    def show(
        records, tokenizer=None, *, color=False, num=3, reads_all=False, **options
    ):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        max_length = options.pop("max_length", 1024)
        data = DataConfig(path=str(path), **options)
        shown = {"max_length": max_length, "num_samples": num, "reads_all": reads_all}
        file = io.StringIO()
        system = "standard" if color else None
        console = Console(
            file=file, force_terminal=color, color_system=system, width=40
        )
        show_data(data, tokenizer, console, **shown)
        return file.getvalue().replace(str(path), "a.jsonl")

    return show


def test_without_colours(show, make_tokenizer):
    records = [{"prompt": f"say {i} ", "completion": "\x1b[31mé"} for i in range(9)]
    assert show(records, make_tokenizer(), num=2) == (
        "a.jsonl: 2 records are read as prompt_completion (prompt, completion)\n\n"
        "record 1: 14 tokens, 8 of them trained on\n"
        "say 0 [[\\x1b[31mé</s>]]\n\n"
        "record 2: 14 tokens, 8 of them trained on\n"
        "say 1 [[\\x1b[31mé</s>]]\n"
    )


def test_with_colours(show, make_tokenizer):
    text = show([{"prompt": "a", "completion": "bé"}], make_tokenizer(), color=True)
    last = text.splitlines()[-1]
    assert last == (
        "\x1b[39ma\x1b[0m\x1b[30;102mb\x1b[0m\x1b[30;102mé\x1b[0m\x1b[30;42m</s>\x1b[0m"
    )


def test_without_a_model(show):
    text = show([{"messages": TALK[:2]}, {"messages": TALK[:1]}], num=1)
    assert text == (
        "a.jsonl: 1 record is read as messages (messages)\n\nrecord 1\n"
        f"<|im_start|>user\n{TALK[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        f"[[{TALK[1]['content']}<|im_end|>]]\n\n\n"
        "Give --model for the tokens and the chat template of a model.\n"
    )


def test_what_is_cut_and_dropped(show, make_tokenizer):
    records = [
        {"prompt": "zz", "completion": "z" * 9},
        {"prompt": "z" * 9, "completion": "z"},
        {"prompt": "z", "completion": 3},
    ]
    options = {"bad_records": "drop", "max_length": 6, "num": 2, "reads_all": True}
    text = show(records, make_tokenizer(chat_templates.CHATML), **options)
    lines = text.split("\n")
    assert lines[2] == (
        "record 1: 12 tokens, 4 of them trained on; longer than max_length=6, and cut "
        "here"
    )
    assert lines[3] == "zz[[zzzz]]"
    assert lines[5].endswith("and cut here; such a sample is dropped")
    assert lines[-2] == (
        "3 records: 12 tokens, 4 of them trained on; longer than "
        "max_length=6: 2 records; 1 cannot be used."
    )


def test_all_records_are_counted(show, caplog):
    records = [
        {"prompt": "a", "completion": 3},
        {"prompt": "a", "completion": "b"},
        *[{"prompt": "a"}] * 8,
    ]
    lines = show(records, reads_all=True).split("\n")
    assert lines[2:4] == ["record 2", "a[[b<|end of text|>]]"]
    assert lines[-4] == (
        "10 records: 9 cannot be used. With data.bad_records: error, the first of "
        "these ends a run."
    )
    said = [record.getMessage() for record in caplog.records]
    assert [
        "dropped record 1: " in said[0],
        "dropped record 3: " in said[1],
        len(said),
    ] == [True, True, 6]
    lines = show(records, reads_all=True, bad_records="drop").split("\n")
    assert lines[-4] == "10 records: 9 cannot be used."


def test_how_pairs_are_read_is_said_whole(show):
    pair = {"chosen": TALK[:2], "rejected": [TALK[0], TALK[3]], "prompt": "Hi; there"}
    text = show([pair], kind="preference")
    assert text.partition("\n")[0] == (
        "a.jsonl: 1 record is read as preference (chosen, rejected: lists of messages; "
        "the prompt is what both begin with)"
    )


def sentence_pieces() -> Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        *((piece, -1.0) for piece in ("▁", "▁sky", "s", "k", "y")),
    ]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {})


@pytest.mark.parametrize("text", ["sky sky", " sky  ks", "s"])
def test_tokens_of_sentence_pieces_have_their_spaces(text):
    tokenizer = sentence_pieces()
    ids = tokenizer.encode_ids([text])[0]
    assert "".join(_token_texts(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_is_shown(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode_ids(["é 中🙂a"])[0]
    texts = list(_token_texts(tokenizer, ids))
    assert len(texts) == len(ids) and "".join(texts) == "é 中🙂a"
    assert [text for text in texts if text] == ["é", " ", "中", "🙂", "a"]
