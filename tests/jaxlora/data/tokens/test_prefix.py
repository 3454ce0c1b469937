"""Tests that a prefix of a long text has the first tokens of the complete text."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.prefix import PrefixEncoder

LETTERS = {c: i for i, c in enumerate("ab=▁ \nσΣé")}


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("b", "a")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def one_word_bpe() -> tokenizers.Tokenizer:
    """As in Llama 2, spaces are marks, and the complete text is one word."""
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("b", "a"), ("a", "b"), ("ba", "ba")]
    tokens = ["<unk>", *LETTERS, *("".join(pair) for pair in merges)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


def unigram(splits: bool) -> tokenizers.Tokenizer:
    """Runs of a letter are split from the end, so the first token shows the length."""
    scores = {"<unk>": -20.0, "aaa": -1.0, "abab": -3.0, "ab": -2.0, "▁a": -1.5}
    scores |= dict.fromkeys(LETTERS, -10.0)
    backend = tokenizers.Tokenizer(models.Unigram(list(scores.items()), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=splits)
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """Spaces are lost, and a long word is one unknown token."""
    vocab = {"[UNK]": 0, "a": 1, "##a": 2, "##b": 3, "b": 4, "=": 5, "##ab": 6}
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=20)
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def greedy_spaces() -> tokenizers.Tokenizer:
    """Added tokens strip spaces around them; runs of spaces and of = are shortened."""
    backend = one_word_bpe()
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("={2,}"), "="),
            normalizers.Strip(),
        ]
    )
    backend.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    backend.add_special_tokens([AddedToken("<|a long token, with words in it|>")])
    return backend


BACKENDS = {
    "byte level": byte_level(),
    "one word": one_word_bpe(),
    "unigram": unigram(splits=False),
    "unigram by words": unigram(splits=True),
    "word piece": word_piece(),
    "greedy spaces": greedy_spaces(),
}

pieces = st.sampled_from(
    [
        *("a", "b", "ab", "=", " ", "\n", "abc", "σ", "Σ ", "é", "e\u0301", "x", "🙂"),
        *("中", "<mask>", "<|a long token, with words in it|>", "aaa", "=-"),
    ]
)
runs = st.tuples(
    st.lists(pieces, min_size=1, max_size=3).map("".join), st.integers(1, 260)
).map(lambda run: run[0] * run[1])
texts = st.lists(runs, min_size=1, max_size=6).map("".join)


def check(backend, text, num_tokens):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()), {})
    (whole,) = tokenizer.encode_batch([text])
    encoder = PrefixEncoder(tokenizer, num_tokens, whole_chars=1)
    (start,) = encoder.encode_batch([text])
    num = len(start.ids)
    assert num == len(whole.ids) or num > num_tokens
    np.testing.assert_array_equal(start.ids, whole.ids[:num])
    np.testing.assert_array_equal(start.spans, whole.spans[:num])
    return num, len(whole.ids)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=texts, num_tokens=st.integers(1, 30))
def test_the_first_tokens_are_those_of_the_whole(name, text, num_tokens):
    check(BACKENDS[name], text, num_tokens)


@pytest.mark.parametrize("extra", range(7))
@pytest.mark.parametrize("pattern", ["a", "ab", "=", " ", "x", "a b", "<mask> "])
@pytest.mark.parametrize("name", BACKENDS)
def test_runs_of_every_remainder(name, pattern, extra):
    check(BACKENDS[name], pattern * 600 + "a" * extra + "b", 5)


@pytest.mark.parametrize("name", BACKENDS)
def test_words_are_not_read_to_their_end(name):
    num, num_whole = check(BACKENDS[name], "ab b = a bab " * 400, 20)
    assert num == 21 < num_whole


@pytest.mark.parametrize("num_spaces", [70, 300, 5000])
def test_spaces_before_a_token_that_takes_them(num_spaces):
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    num, _ = check(backend, "ab" + " " * num_spaces + "<mask> b", 6)
    assert num == 4


def test_a_cut_within_an_added_token():
    backend = byte_level()
    token = "<|" + "a b " * 60 + "|>"
    backend.add_special_tokens([token])
    for num_before in range(2, 200, 9):
        check(backend, "=" * num_before + token * 9, 3)


def test_short_and_long_texts_keep_their_order():
    tokenizer = Tokenizer(byte_level(), {})
    given = ["a", "ab " * 3000, "", "b" * 50, "=" * 5000, "ab"]
    encoder = PrefixEncoder(tokenizer, 3, whole_chars=100)
    found, expected = encoder.encode_batch(given), tokenizer.encode_batch(given)
    for prefix, whole in zip(found, expected, strict=True):
        np.testing.assert_array_equal(prefix.ids, whole.ids[: len(prefix.ids)])
    assert [len(prefix.ids) for prefix in found] == [1, 4, 0, 50, 4, 1]
    for ids, prefix in zip(encoder.encode_ids(given), found, strict=True):
        np.testing.assert_array_equal(ids, prefix.ids)
