"""Tokens as text, and stop texts in it."""

import pytest
import tokenizers
from tokenizers import decoders, models

from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.generate.answer_text import AnswerText

END = 2


@pytest.fixture
def tokenizer(tiny_folder):
    return load_tokenizer(tiny_folder)


def answer(tokenizer, *stop, prompt="ask: "):
    return AnswerText(tokenizer, tokenizer.encode(prompt), stop, {END})


def test_end_tokens_and_stop_texts_are_left_out(tokenizer):
    ids = [*tokenizer.encode("one two"), END]
    assert answer(tokenizer).of(ids) == "one two"
    assert answer(tokenizer, "wo", "tw").of(ids) == "one "
    assert answer(tokenizer, "wo").num_until_stop(ids, 0) == 7
    assert answer(tokenizer, "tw").num_until_stop(ids, 5) == 6
    assert answer(tokenizer, "x").num_until_stop(ids, 0) is None


def test_only_settled_text_is_streamed(tokenizer):
    text = answer(tokenizer, "###", "end")
    ids = tokenizer.encode("né##")
    assert [text.settled(ids[:n]) for n in range(1, 6)] == ["n", "n", "né", "né", "né"]
    assert text.settled(tokenizer.encode("a##b e")) == "a##b "


def test_an_answer_keeps_the_space_before_its_first_word():
    """The decoder of Llama 2 drops it at the start of a text."""
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    assert backend.decode([2]) == "b"
    assert AnswerText(Tokenizer(backend, {}), [1], (), ()).of([2]) == " b"
