import json
import logging

import numpy as np
import pytest
import tokenizers

from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import DataError, ModelError
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import SYSTEM, TALK
from tests.jaxlora.data.conftest import SPECIAL


def test_special_tokens_are_texts_or_objects(make_tokenizer):
    tokenizer = make_tokenizer()
    assert (tokenizer.bos_token, tokenizer.bos_id) == ("<s>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("</s>", 1)
    assert (tokenizer.pad_token, tokenizer.pad_id) == ("<pad>", 4)


@pytest.mark.parametrize(
    ("around", "prefix", "suffix"),
    [
        ("$A", [], []),
        ("<s> $A", [0], []),
        ("<s> $A </s>", [0], [1]),
        ("<s> <s> $A", [0, 0], []),
    ],
)
def test_post_processor_decides_on_special_tokens(
    make_folder, around, prefix, suffix, caplog
):
    folder = make_folder(around)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    for text in ("", "a", "Hello! é🙂"):
        inner = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == prefix + inner + suffix
        assert tokenizer.encode(text) == theirs.encode(text).ids
        assert tokenizer.decode(inner) == text
    assert tokenizer.decode([0, 65, 1], skip_special_tokens=True) == tokenizer.decode(
        [65]
    )
    assert not caplog.records


def test_ignored_flags_are_named(make_folder, caplog):
    config = {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": False}
    with caplog.at_level(logging.WARNING):
        load_tokenizer(make_folder("$A", config=config))
    (record,) = caplog.records
    assert "add_bos_token=True in tokenizer_config.json has no" in record.getMessage()


def test_spans_are_characters_and_tile_the_text(make_tokenizer):
    tokenizer = make_tokenizer(around="<s> $A")
    text = "🙂 Hello  </s> \n é  "
    (encoded,) = tokenizer.encode_batch([text])
    assert encoded.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    (ids,) = tokenizer.encode_ids([text])
    assert ids.tolist() == encoded.ids.tolist()
    assert ids.dtype == encoded.ids.dtype == np.int32
    covered = set()
    for start, end in encoded.spans:
        assert start < end
        covered |= set(range(start, end))
    assert covered == set(range(len(text)))
    (start, end) = encoded.spans[encoded.ids.tolist().index(1)]
    assert text[start:end] == "</s>"


def test_padding_and_truncation_of_the_file_are_off(make_folder):
    path = make_folder() / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(path))
    tokenizer = load_tokenizer(path.parent)
    assert len(tokenizer.encode_batch(["Zzyzx!"])[0].ids) == 6


def test_special_tokens_map(make_folder):
    files = {"special_tokens_map__json": json.dumps({"bos_token": "<|im_start|>"})}
    old = {"bos_token": "<s>", "eos_token": "</s>"}
    assert load_tokenizer(make_folder(config=old, **files)).bos_id == 2
    new = old | {"added_tokens_decoder": {}}
    assert load_tokenizer(make_folder(config=new, **files)).bos_id == 0


@pytest.mark.parametrize(
    ("files", "eos_id"),
    [
        ({}, None),
        ({"config__json": '{"eos_token_id": 3}'}, 3),
        (
            {
                "config__json": '{"eos_token_id": 3}',
                "generation_config__json": '{"eos_token_id": [1, 3]}',
            },
            1,
        ),
    ],
)
def test_falls_back_to_the_eos_of_the_model(make_folder, files, eos_id):
    folder = make_folder(config={"bos_token": None}, **files)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id == eos_id
    assert tokenizer.bos_id is None


def test_check_fits(make_tokenizer):
    tokenizer = make_tokenizer()
    assert tokenizer.vocab_size == 300
    tokenizer.check_fits(300)
    tokenizer.check_fits(512)
    with pytest.raises(ModelError, match=r"largest token id is 299 .*only 299 embedd"):
        tokenizer.check_fits(299)


def test_vocab_size_counts_holes(make_folder):
    path = make_folder() / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 400})
    content["added_tokens"][-1]["content"] = "<far>"
    content["model"]["vocab"]["<far>"] = 400
    path.write_text(json.dumps(content))
    assert load_tokenizer(path.parent).vocab_size == 401


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(tmp_path / "none")


def test_missing_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    match = r"has no tokenizer\.json .*AutoTokenizer\.from_pretrained\(folder\)\.save"
    with pytest.raises(ModelError, match=match):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        (
            "tokenizer__json",
            "version https://git-lfs",
            r"tokenizer\.json: cannot be re",
        ),
        ("tokenizer_config__json", "{", "tokenizer_config.json: is not valid JSON"),
        ("tokenizer_config__json", "[]", "tokenizer_config.json: must hold an object"),
        (
            "tokenizer_config__json",
            '{"bos_token": "<nope>"}',
            "bos_token is '<nope>', which is not in tokenizer.json",
        ),
    ],
)
def test_damaged_files(make_folder, name, content, match):
    with pytest.raises(ModelError, match=match):
        load_tokenizer(make_folder(**{name: content}))


def test_template_that_is_not_utf8(make_folder):
    folder = make_folder()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: is not UTF-8"):
        load_tokenizer(folder)


def test_post_processor_that_repeats_the_text(make_folder):
    with pytest.raises(ModelError, match=r"post-processor of tokenizer\.json turns"):
        load_tokenizer(make_folder("$A $A"))


# --- Chat templates. The texts below are what transformers 5.17 renders. -----

CHATML_TALK = (
    "<|im_start|>user\nHi <there> & 🙂 <|im_end|>\n"
    "<|im_start|>assistant\nHello!<|im_end|>\n"
    "<|im_start|>user\nHow?<|im_end|>\n"
    "<|im_start|>assistant\nFine.\n<|im_end|>\n"
)
LLAMA3_SYSTEM = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
)
LLAMA3_USER = (
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi <there> & 🙂<|eot_id|>"
)
LLAMA3_ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
CALL = {"function": {"name": "f", "arguments": {"x": "<é>"}}}


@pytest.mark.parametrize(
    ("template", "messages", "extras", "expected"),
    [
        (
            chat_templates.SMOLLM2,
            TALK,
            {},
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained "
            "by Hugging Face<|im_end|>\n" + CHATML_TALK,
        ),
        (
            chat_templates.SMOLLM2,
            [SYSTEM, *TALK[:1]],
            {"add_generation_prompt": True},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
            "Hi <there> & 🙂 <|im_end|>\n<|im_start|>assistant\n",
        ),
        (chat_templates.CHATML, TALK, {}, CHATML_TALK),
        (
            chat_templates.LLAMA3,
            TALK,
            {},
            f"{LLAMA3_SYSTEM}{LLAMA3_USER}{LLAMA3_ANSWER}Hello!<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>"
            f"{LLAMA3_ANSWER}Fine.<|eot_id|>",
        ),
        (
            chat_templates.LLAMA3,
            [SYSTEM, *TALK[:1]],
            {"add_generation_prompt": True},
            f"{LLAMA3_SYSTEM}Be brief.{LLAMA3_USER}{LLAMA3_ANSWER}",
        ),
        (
            chat_templates.LLAMA3,
            [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
            {},
            f"{LLAMA3_SYSTEM}<|eot_id|>{LLAMA3_ANSWER}"
            '{"name": "f", "arguments": {"x": "<é>"}}<|eot_id|>',
        ),
        (
            chat_templates.LLAMA3,
            TALK[:1],
            {"tools": [{"name": "é<"}]},
            "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
            '{\n    "name": "é<"\n}\n\nToday Date: 26 Jul 2024\n\n' + LLAMA3_USER,
        ),
        (
            chat_templates.MISTRAL,
            TALK,
            {"add_generation_prompt": True},
            "<s>[INST] Hi <there> & 🙂  [/INST]Hello!</s>[INST] How? [/INST]"
            "Fine.\n</s>",
        ),
    ],
)
def test_renders_as_transformers(make_tokenizer, template, messages, extras, expected):
    tokenizer = make_tokenizer(template)
    assert tokenizer.chat.render(messages, **extras) == expected


def test_template_file_overrides_the_config(make_folder):
    def render(messages, **files):
        return load_tokenizer(make_folder(**files)).chat.render(messages)

    assert render(TALK).startswith("<|im_start|>system")
    assert render([], chat_template__jinja="file") == "file"


def test_named_templates(make_folder):
    named = [
        {"name": "tool_use", "template": "t{{ tools[0].name }}"},
        {"name": "default", "template": "d"},
    ]
    folder = make_folder(config={"chat_template": named})
    assert load_tokenizer(folder).chat.render([]) == "d"
    assert load_tokenizer(folder).chat.render([], tools=[{"name": "f"}]) == "tf"
    folder = make_folder(config={"chat_template": named[:1]})
    with pytest.raises(ModelError, match="chat templates named tool_use, but no 'def"):
        load_tokenizer(folder).chat.render(TALK)


def test_no_template(make_folder):
    tokenizer = load_tokenizer(make_folder(config={}))
    with pytest.raises(ModelError, match=r"no chat template.*Set chat_template"):
        tokenizer.chat.render(TALK)


def test_template_that_does_not_parse(make_tokenizer):
    with pytest.raises(ModelError, match="chat template does not parse"):
        make_tokenizer("{% if %}").chat.render(TALK)


def test_template_may_refuse(make_tokenizer):
    with pytest.raises(DataError, match="roles must alternate"):
        make_tokenizer(chat_templates.MISTRAL).chat.render([SYSTEM, *TALK])


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ ''.__class__ }}", "SecurityError: access to '__class__' of a str"),
        ("{{ ''['__class__'] }}", "SecurityError: access to '__class__'"),
        ("{{ ''|attr('__class__') }}", "SecurityError: access to '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError: access to 'append' of a list"),
        ("{{ '{0.__class__}'.format(1) }}", "SecurityError: access to '__class__'"),
        ("{{ raise_exception.__globals__ }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[9].role }}", "UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for a in range(999999) %}{% endfor %}", "OverflowError"),
    ],
)
def test_templates_are_contained(make_tokenizer, template, match):
    with pytest.raises(DataError, match=match):
        make_tokenizer(template).chat.render(TALK)


@pytest.mark.usefixtures("tight_limits")
def test_chat_template_without_end(make_tokenizer):
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    tokenizer = make_tokenizer(template + "{% endfor %}")
    match = r"the chat template of .*model exceeds a limit: it takes more than 0\.3 s\."
    with pytest.raises(DataError, match=match):
        tokenizer.chat.render(TALK)


def test_the_time_limit_is_per_rendering(make_tokenizer, tight_limits):
    tokenizer = make_tokenizer("{% for i in range(99999) %}{% endfor %}x")
    for _ in range(50):
        assert tokenizer.chat.render([]) == "x"


def test_templates_may_use_common_features(make_tokenizer):
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}"
        "{% set ns.n = ns.n + 1 %}{{ loop.index }}/{{ loop.length }}{{ '-' * 2 }}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n }}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}{{ unknown }}"
    )
    silent = [message | {"content": ""} for message in TALK]
    assert make_tokenizer(template).chat.render(silent) == "1/2--2/2--2a1"


def test_special_tokens_in_text_are_read_as_such(make_tokenizer):
    ids = make_tokenizer().encode("".join(SPECIAL))
    assert ids == list(range(len(SPECIAL)))
