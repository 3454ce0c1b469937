"""Tests tokenizer files that are damaged or hold values of the wrong type."""

import json
import os

import pytest
import tokenizers

from jaxlora.common.rust import wrap_errors
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import ModelError


def changed(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize("key", ["bos_token", "eos_token", "pad_token", "unk_token"])
@pytest.mark.parametrize("value", [1, 1.5, False, [], ["<s>"], {"content": 5}, {}])
def test_special_tokens_of_the_wrong_type(make_folder, key, value):
    folder = changed(make_folder(), "tokenizer_config.json", **{key: value})
    match = (
        rf"{key} is .* in tokenizer_config\.json or .*; expected a string, an object"
    )
    with pytest.raises(ModelError, match=match):
        load_tokenizer(folder)


def test_half_of_a_character(make_folder):
    folder = make_folder()
    path = folder / "tokenizer_config.json"
    path.write_text('{"bos_token": "\\ud800"}')
    with pytest.raises(ModelError, match=r"bos_token is '\\ud800' in tokenizer_config"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "value",
    [1, True, ["text"], [{"template": "t"}], [{"name": "default"}], {"default": 1}],
)
def test_chat_templates_of_the_wrong_type(make_folder, value):
    folder = changed(make_folder(), "tokenizer_config.json", chat_template=value)
    match = r"tokenizer_config\.json: chat_template is .*; expected a string, or a list"
    with pytest.raises(ModelError, match=match):
        load_tokenizer(folder)


@pytest.mark.parametrize("value", ["1", True, [True], -1, 2**40, 1.0, [[1]]])
def test_ids_of_the_wrong_type(make_folder, value):
    text = json.dumps({"eos_token_id": value})
    folder = make_folder(config={}, generation_config__json=text)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is"):
        load_tokenizer(folder)


def bpe(**changes):
    return {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [], **changes}


# Those with a star make the library panic, some of them when it encodes a text.
DAMAGE = {
    "charsmap *": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    },
    "charsmap of no characters *": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": "CAAAAAAAAAAAAAAA",
        }
    },
    "prefix *": {
        "model": bpe(continuing_subword_prefix="zzzzzzz", merges=[["a", "b"]])
    },
    "pieces of no length *": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "post-processor *": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "no", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "expression": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "("},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "kind of an added token": {"added_tokens": [5]},
    "no tokens": {"model": bpe(vocab={}), "added_tokens": []},
    "merge of nothing": {"model": bpe(merges=[["no", "such"]])},
    "id beyond": {"model": bpe(vocab={"a": 2**32 - 1})},
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_tokenizer(make_folder, kind, capfd):
    folder = changed(make_folder(config={}), "tokenizer.json", **DAMAGE[kind])
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_json_that_python_cannot_parse(make_folder, name):
    folder = make_folder()
    for text in ("[" * 100_000, '{"version": ' + "1" * 5000 + "}"):
        (folder / name).write_text(text)
        with pytest.raises(ModelError, match=name):
            load_tokenizer(folder)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_file_of_another_kind(make_folder, name, kind):
    folder = make_folder()
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    with pytest.raises(ModelError, match=name):
        load_tokenizer(folder)


def test_a_panic_while_a_text_is_encoded(make_folder, backend_json):
    folder = make_folder(config={})
    tokenizer = load_tokenizer(folder)
    # Texts of one letter are fine, as the one that is encoded to load it.
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAA"}
    content = json.loads(backend_json) | {"normalizer": normalizer}
    tokenizer._backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    match = r"model: its tokenizer\.json failed \(index out of bounds.*fetch it again"
    with pytest.raises(ModelError, match=match):
        tokenizer.encode("Hello")
    with pytest.raises(ModelError, match=match):
        tokenizer.encode_batch(["Hello", "there"])
    with pytest.raises(ModelError, match=match):
        tokenizer.encode_ids(["Hello", "there"])


class PanicException(BaseException):
    """Has the name that pyo3 gives to a panic in Rust."""


def test_a_panic_is_an_error_without_other_output(capfd):
    with (
        pytest.raises(
            ModelError, match=r"t\.json: cannot be read \(oh no\)\. Fetch it"
        ),
        wrap_errors("t.json", "Fetch it again.", ModelError),
    ):
        os.write(2, b"thread '<unnamed>' panicked at src/lib.rs\n")
        raise PanicException("oh no")
    assert capfd.readouterr().err == ""


def test_other_output_is_kept(capfd):
    with wrap_errors("t.json", "Fetch it again.", ModelError):
        os.write(2, b"a warning\n")
    with pytest.raises(ModelError), wrap_errors("t.json", "Fetch it.", ModelError):
        os.write(2, b"an error\n")
        raise ValueError("an error")
    assert capfd.readouterr().err == "a warning\nan error\n"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_other_exceptions_pass(kind):
    with pytest.raises(kind), wrap_errors("t.json", "Fetch it.", ModelError):
        raise kind
