"""Tests the tokens around a boundary with tokenizers of several kinds."""

import functools

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Rendered
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.boundary import BoundaryEncoder, BoundaryText
from jaxlora.data.tokens.encode import Encoder

CORPUS = [
    "the answer is blue. Answer: blue or red\n sky Hello there 12 345 é ASSISTANT:"
]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]


def trained(model: str) -> tuple[tokenizers.Tokenizer, trainers.Trainer]:
    if model == "unigram":
        backend = tokenizers.Tokenizer(models.Unigram())
        return backend, trainers.UnigramTrainer(
            vocab_size=120,
            special_tokens=SPECIAL,
            unk_token="<unk>",
            show_progress=False,
        )
    backend = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    special = SPECIAL + (BYTES if model == "bpe" else [])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if model == "byte-level" else []
    return backend, trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )


@functools.cache
def make_backend(model: str, start: str) -> str:
    """Makes the tokenizer.json of a small tokenizer.

    `start` says how it changes the start of a text.

    `legacy` is what Llama 2's tokenizer.json does: a normalizer that prepends a space.
    """
    backend, trainer = trained(model)
    if model == "byte-level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=start == "space"
        )
        backend.decoder = decoders.ByteLevel()
    elif start == "legacy":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=start)
    if model != "byte-level":
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
            ]
        )
    backend.train_from_iterator(CORPUS * 5, trainer)
    return backend.to_str()


@functools.cache
def make_tokenizer(model: str, start: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(make_backend(model, start))
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


SPACED = [
    (model, start)
    for model in ("bpe", "unigram")
    for start in ("always", "first", "legacy")
] + [("byte-level", "space")]
PLAIN = [("byte-level", "plain"), ("bpe", "never"), ("unigram", "never")]


def encode(tokenizer, record, **options):
    encoder = Encoder(DataConfig(path="x", **options), tokenizer)
    (sample,) = encoder([record])
    assert sample.weights is None and sample.top is None
    return sample.token_ids, sample.is_target


def learned(tokenizer, record, **options) -> tuple[str, str]:
    """Returns the text before the first target, and the text of the targets."""
    ids, is_target = encode(tokenizer, record, **options)
    first = int(np.argmax(is_target))
    assert is_target[first:].all()
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])


@pytest.mark.parametrize(("model", "start"), SPACED)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Answer:\n", "blue"),
        ("Answer: ", "blue"),
        ("Answer:", " blue"),
        ("Answer:", "blue"),
        ("Answer: ", " blue"),
        ("Answer:\n", "\nblue"),
        ("the sky</s>", "blue"),
        ("é", "é"),
        ("é ", "é"),
        ("12", "345"),
    ],
)
def test_completion_has_no_space_of_its_own(model, start, prompt, completion):
    tokenizer = make_tokenizer(model, start)
    before, after = learned(tokenizer, Rendered(completion, prompt=prompt))
    whole = tokenizer.decode([*tokenizer.encode(prompt + completion), 2])
    assert before + after == whole
    # After a special token, some put a space before the next word: so in inference.
    spaced_again = "</s>" in prompt and start != "first"
    assert after == " " * spaced_again + completion + "</s>"


@pytest.mark.parametrize(("model", "start"), SPACED + PLAIN)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prompt_is_encoded_as_in_inference(model, start, data):
    tokenizer = make_tokenizer(model, start)
    pieces = st.lists(st.sampled_from([*"ab :\nuel1é", "</s>"]), max_size=8)
    texts = pieces.map("".join)
    prompt, completion = data.draw(texts), data.draw(texts.filter(bool))
    ids, is_target = encode(
        tokenizer, Rendered(completion, prompt=prompt), append_eos=False
    )
    alone = tokenizer.encode(prompt)
    if prompt:
        assert ids[: len(alone)].tolist() == alone
        assert is_target.tolist() == [False] * len(alone) + [True] * (
            len(ids) - len(alone)
        )
    together = tokenizer.encode(prompt + completion)
    assert tokenizer.decode(ids) == tokenizer.decode(together)


@pytest.mark.parametrize(("model", "start"), PLAIN)
@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text(st.sampled_from("ab :\nuel1é"), max_size=8),
    completion=st.text(st.sampled_from("ab :\nuel1é"), min_size=1, max_size=8),
)
def test_plain_tokenizers_encode_both_parts_separately(
    model, start, prompt, completion
):
    tokenizer = make_tokenizer(model, start)
    ids, is_target = encode(tokenizer, Rendered(completion, prompt=prompt))
    apart = [tokenizer.encode(text) for text in (prompt, completion)]
    assert ids.tolist() == [*apart[0], *apart[1], 2]
    expected = [False] * len(apart[0]) + [True] * (len(apart[1]) + 1)
    assert is_target.tolist()[1:] == expected[1:]


@pytest.mark.parametrize("loss_on", ["completion", "all"])
@pytest.mark.parametrize(("model", "start"), SPACED)
def test_loss_on_all_has_the_same_tokens(model, start, loss_on):
    tokenizer = make_tokenizer(model, start)
    ids, is_target = encode(
        tokenizer, Rendered("blue", prompt="Answer:\n"), loss_on=loss_on
    )
    joint = [*tokenizer.encode("Answer:\nblue"), 2]
    assert ids.tolist() == joint
    num = len(tokenizer.encode("Answer:\n")) if loss_on == "completion" else 1
    assert is_target.tolist() == [i >= num for i in range(len(joint))]


@pytest.mark.parametrize(("prompt", "completion"), [("ü", "🙂"), ("🙂 ", "üü")])
@pytest.mark.parametrize("start", ["always", "first", "legacy", "never"])
def test_characters_of_several_tokens(start, prompt, completion):
    tokenizer = make_tokenizer("bpe", start)
    before, after = learned(tokenizer, Rendered(completion, prompt=prompt))
    assert (before.strip(" "), after) == (prompt.strip(" "), f"{completion}</s>")


@pytest.mark.parametrize(("model", "start"), SPACED)
def test_empty_prompt_begins_as_a_text(model, start):
    tokenizer = make_tokenizer(model, start)
    ids, is_target = encode(tokenizer, Rendered("blue", prompt=""))
    assert ids.tolist() == [*tokenizer.encode("blue"), 2]
    assert is_target.tolist() == [False] + [True] * (len(ids) - 1)
    assert encode(tokenizer, Rendered("blue"))[0].tolist() == ids.tolist()


@pytest.mark.parametrize(("model", "start"), SPACED + PLAIN)
def test_answers_in_a_chat_begin_after_the_prompt(model, start):
    tokenizer = make_tokenizer(model, start)
    text = "sky ASSISTANT: blue</s> red ASSISTANT: red sky</s>"
    spans = tuple(
        (text.index(answer), text.index(answer) + len(answer))
        for answer in ("blue</s>", "red sky</s>")
    )
    ids, is_target = encode(tokenizer, Rendered(text, spans))
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text))
    prompt = tokenizer.encode(text[: spans[0][0]])
    assert ids[: len(prompt)].tolist() == prompt
    assert not is_target[: len(prompt)].any() and is_target[len(prompt)]
    parts = np.split(ids, np.flatnonzero(np.diff(is_target)) + 1)
    assert [tokenizer.decode(part) for part in parts[1::2]] == [
        "blue</s>",
        "red sky</s>",
    ]


def test_chats_of_byte_level_tokenizers_keep_their_ids():
    tokenizer = make_tokenizer("byte-level", "plain")
    text = "<s>sky\nblue</s>é\nred🙂</s>"
    spans = tuple((text.index(a), text.index(a) + len(a)) for a in ("blue", "red🙂"))
    ids, is_target = encode(tokenizer, Rendered(text, spans))
    assert ids.tolist() == tokenizer.encode(text)
    assert tokenizer.decode(ids[is_target]) == "bluered🙂"


def test_a_token_that_the_prompt_lacks_belongs_to_the_answer():
    # This normalizer drops spaces at the end, as some SentencePiece models do. So the
    # space between prompt and completion is written by the model.
    backend = tokenizers.Tokenizer.from_str(make_backend("bpe", "always"))
    backend.normalizer = normalizers.Strip(left=False, right=True)
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    ids, is_target = encode(tokenizer, Rendered("blue", prompt="Answer: "))
    assert ids.tolist() == [*tokenizer.encode("Answer: blue"), 2]
    assert tokenizer.decode(ids[is_target]) == " blue</s>"


def test_boundaries_are_counted_in_characters():
    tokenizer = make_tokenizer("byte-level", "plain")
    encoder = BoundaryEncoder(tokenizer.encode_batch)
    (encoded,) = encoder.encode([BoundaryText("é🙂é", (1, 2))])
    assert encoded.ids.tolist() == tokenizer.encode("é🙂é")
