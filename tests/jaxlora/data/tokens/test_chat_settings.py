"""Settings of chats: another template, other names of roles, the last answer only."""

import json

import pytest

from jaxlora import DataConfig, LoraJob, RunConfig
from jaxlora.data.templates.known import CHATML, KNOWN, LLAMA3
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError, DataError
from jaxlora.generate.generator import Generator, prompt_ids
from jaxlora.generate.prompt import Prompt
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.conftest import NOW
from tests.jaxlora.data.tokens.test_tokenize import show

TALK = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "How are you?"},
    {"role": "user", "content": "Fine."},
    {"role": "assistant", "content": "The answer is blue."},
]
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def base(make_folder):
    """A tokenizer without a chat template, as that of a base."""
    return load_tokenizer(make_folder(config=SPECIAL), now=NOW)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("form", ["name", "text", "file", "folder"])
def test_a_template_for_a_base_without_one(
    run, base, make_tokenizer, tmp_path, name, form
):
    """Samples are those of a tokenizer that has the template itself."""
    (tmp_path / "mine.jinja").write_text(KNOWN[name])
    (tmp_path / "instruct").mkdir()
    (tmp_path / "instruct" / "chat_template.jinja").write_text(KNOWN[name])
    given = {"name": name, "text": KNOWN[name]}
    given |= {"file": str(tmp_path / "mine.jinja")}
    given |= {"folder": str(tmp_path / "instruct")}
    (found,) = run(
        [{"messages": TALK}], base, data={"chat_template": given[form]}
    ).samples
    own = make_tokenizer(KNOWN[name])
    (wanted,) = run([{"messages": TALK}], own).samples
    assert show(own, found) == show(own, wanted)
    assert [text for is_target, text in show(own, found) if is_target] == [
        f"How are you?{'<|im_end|>' if name == 'chatml' else '<|eot_id|>'}",
        f"The answer is blue.{'<|im_end|>' if name == 'chatml' else '<|eot_id|>'}",
    ]


def test_known_templates_print_what_these_models_read(make_tokenizer):
    assert make_tokenizer(CHATML).chat.render(TALK[:1], add_generation_prompt=True) == (
        "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert make_tokenizer(LLAMA3).chat.render(TALK[:1], add_generation_prompt=True) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_each_job_has_its_own_template(base, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    reader = DataReader(base)
    found = {
        name: base.decode(reader.read(job).samples[0].token_ids)
        for name in KNOWN
        for job in [LoraJob(name=name, data={"path": str(path), "chat_template": name})]
    }
    assert "<|im_start|>user" in found["chatml"]
    assert "<|start_header_id|>user" in found["llama3"]


# As Qwen3.5: the generation prompt opens a thought, or has an empty one.
THINKING = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- set parts = m.content.split('</think>') %}
    {%- if m.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + parts[:-1] | join | replace('<think>', '') | trim }}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- parts[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {{- '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}
{%- endif %}
"""
OFF = {"enable_thinking": False}


def prompt_tokens(sample):
    return sample.token_ids[: sample.is_target.argmax()].tolist()


@pytest.fixture
def joining(make_folder):
    """Makes a tokenizer in which two line breaks are one token, 300."""

    def make(template):
        folder = make_folder(chat_template__jinja=template)
        settings = json.loads((folder / "tokenizer.json").read_text())
        first, *_ = added = settings["added_tokens"]
        added.append({**first, "id": 300, "content": "\n\n", "special": False})
        (folder / "tokenizer.json").write_text(json.dumps(settings))
        return load_tokenizer(folder, now=NOW)

    return make


@pytest.mark.parametrize("template", [THINKING, chat_templates.QWEN3])
@pytest.mark.parametrize("kwargs", [{}, OFF])
@pytest.mark.parametrize("own", ["", "<think>\n\n</think>\n\n"])
def test_an_empty_thought_is_part_of_the_prompt(
    run, joining, template, kwargs, own, caplog
):
    """Its tokens are those of generation with thinking off."""
    tokenizer = joining(template)
    talk = [TALK[0], TALK[1] | {"content": own + TALK[1]["content"]}]
    data = {"chat_template_kwargs": kwargs}
    with caplog.at_level("INFO"):
        (sample,) = run([{"messages": talk}], tokenizer, data=data).samples
    prompt = Prompt(talk[:1])
    asked = prompt_ids(prompt, tokenizer.with_setting(None, OFF), 512)
    assert 300 in asked
    assert tokenizer.decode(sample.token_ids) == tokenizer.chat.render(talk)
    is_noted = "prints an empty thought before 1 answer" in caplog.text
    answer = "How are you?<|im_end|>"
    if own and not kwargs and template == chat_templates.QWEN3:
        # The generation prompt has no part of it, so the model is to write it.
        assert (True, own + answer) in show(tokenizer, sample) and not is_noted
        return
    assert prompt_tokens(sample) == asked
    assert (True, answer) in show(tokenizer, sample)
    assert is_noted == (not kwargs)


@pytest.mark.parametrize("template", [THINKING, chat_templates.QWEN3])
def test_a_thought_is_learned(run, joining, template):
    tokenizer = joining(template)
    talk = [TALK[0], TALK[1] | {"content": "<think>\nhm\n</think>\n\nFine."}]
    (sample,) = run([{"messages": talk}], tokenizer).samples
    asked = prompt_ids(Prompt(talk[:1]), tokenizer, 512)
    assert prompt_tokens(sample) == asked
    learned = tokenizer.decode(sample.token_ids[sample.is_target])
    assert learned.endswith("hm\n</think>\n\nFine.<|im_end|>")


def test_kwargs_of_templates(run, make_tokenizer):
    tokenizer = make_tokenizer(CHATML + "{{ greeting | tojson if greeting }}")
    plain, *others = (
        run([{"messages": TALK}], tokenizer, data={"chat_template_kwargs": kwargs})
        for kwargs in ({}, {"greeting": "hi"}, {"greeting": {"a": [1, None, 2.5]}})
    )
    start, *said = (
        tokenizer.decode(one.samples[0].token_ids) for one in (plain, *others)
    )
    assert said == [start + '"hi"', start + '{"a": [1, null, 2.5]}']
    wrong = {"chat_template_kwargs": {"greting": 1}}
    match = r"has 'greting', which .* does not use \(it uses .*greeting, messages"
    with pytest.raises(DataError, match=match):
        run([{"messages": TALK}], tokenizer, data=wrong)
    with pytest.raises(
        DataError, match="are for chats, and the records are read as te"
    ):
        run([{"text": "a"}], tokenizer, data=wrong)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        *(({name: 1}, f"'{name}' is given to") for name in ("messages", "tools")),
        *(({name: 1}, "Leave it out") for name in ("documents", "bos_token")),
        ({"add_generation_prompt": True}, "given to chat templates by the program"),
        ({1: 2}, "1 is not the name of a variable"),
        ({"a b": 2}, "'a b' is not the name of a variable"),
        ({"a": {1}}, r"a is \{1\}, and must be true, false, null, a number, a text"),
        ({"a": [float("nan")]}, "and must be true, false"),
        (["a"], "expected names with values, such as"),
    ],
)
def test_kwargs_that_cannot_be_used(kwargs, match):
    with pytest.raises(ConfigError, match=match):
        DataConfig(path="a.jsonl", chat_template_kwargs=kwargs)


def test_kwargs_of_a_generator_are_checked():
    with pytest.raises(ConfigError, match="chat_template_kwargs: 'tools' is given to"):
        Generator("no model", chat_template_kwargs={"tools": 1})


def test_thoughts_that_are_left_out_are_counted_in_one_line(
    run, make_tokenizer, caplog
):
    tokenizer = make_tokenizer(chat_templates.QWEN3)
    thought = TALK[1] | {"content": "<think>\nhm\n</think>\n\nFine."}
    record = {"messages": [TALK[0], thought, *TALK[2:]]}
    found = run([record] * 3, tokenizer, data={"loss_on": "last"})
    assert len(found.samples) == 3
    (line,) = [one.message for one in caplog.records if "leaves out" in one.message]
    assert "leaves out the thoughts of 3 answers" in line
    with pytest.raises(DataError, match="record 1: the chat template does not print"):
        run([record], tokenizer)
    kept = run([record, {"messages": TALK}], tokenizer, data={"bad_records": "drop"})
    assert (len(kept.samples), kept.num_bad) == (1, 1)


@pytest.mark.parametrize("template", [chat_templates.SMOLLM2, CHATML, GENERATION])
def test_the_last_answer_only(run, make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    (sample,) = run([{"messages": TALK}], tokenizer, data={"loss_on": "last"}).samples
    learned = [text for is_target, text in show(tokenizer, sample) if is_target]
    assert len(learned) == 1 and learned[0].startswith("The answer is blue.")


def test_the_last_answer_of_prompts_and_of_weighted_messages(run, make_tokenizer):
    tokenizer = make_tokenizer()
    last = {"loss_on": "last"}
    pair = {"prompt": TALK[:1], "completion": TALK[1:]}
    (sample,) = run([pair], tokenizer, data=last).samples
    learned = [text for is_target, text in show(tokenizer, sample) if is_target]
    assert learned == ["The answer is blue.<|im_end|>"]
    (sample,) = run([{"prompt": "Hello! ", "completion": "Fine."}], data=last).samples
    assert show(tokenizer, sample)[-1] == (True, "Fine.</s>")
    muted = [*TALK[:3], TALK[3] | {"weight": 0}]
    with pytest.raises(DataError, match="1 have no token to predict"):
        run([{"messages": muted}], tokenizer, data=last)


def test_roles_of_the_records(run, make_tokenizer):
    """Also of speakers, whose usual meaning they replace."""
    tokenizer = make_tokenizer()
    (wanted,) = run([{"messages": TALK}], tokenizer).samples
    names = {"user": "customer", "assistant": "Pip"}
    mine = [{**m, "role": names[m["role"]]} for m in TALK]
    said = [{"from": m["role"], "value": m["content"]} for m in mine]
    back = {"roles": {"customer": "user", "Pip": "assistant"}}
    for messages in (mine, said):
        (found,) = run([{"messages": messages}], tokenizer, data=back).samples
        assert show(tokenizer, found) == show(tokenizer, wanted)
    swapped = [{"from": "bot", "value": "Hello!"}, *said[1:]]
    roles = {"roles": back["roles"] | {"bot": "user"}}
    (found,) = run([{"messages": swapped}], tokenizer, data=roles).samples
    assert show(tokenizer, found) == show(tokenizer, wanted)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chatmll", "'chatmll' is neither a name (chatml, llama3) nor a file"),
        ("EMPTY", "is a folder without a chat template. Give the folder of an"),
        ("BYTES", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("{% for %}", "chat_template '{% for %}': the chat template does not parse"),
    ],
)
def test_templates_that_cannot_be_used(run, base, tmp_path, template, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    places = {"EMPTY": tmp_path / "empty", "BYTES": tmp_path / "bytes.jinja"}
    given = str(places.get(template, template))
    with pytest.raises(Exception) as caught:
        run([{"messages": TALK}], base, data={"chat_template": given})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"chat_template": "chatml"},
            "chat_template is for chats, and the",
        ),
        (
            {"roles": {"Pip": "assistant"}},
            "roles are those of messages, and",
        ),
    ],
)
def test_settings_of_chats_for_other_records(run, base, setting, message):
    with pytest.raises(DataError, match=message):
        run([{"prompt": "a", "completion": "b"}], base, data=setting)


def test_settings_that_contradict():
    with pytest.raises(ConfigError, match="Set loss_on in data: completion trains on"):
        DataConfig(path="a", train_on="last")
    samples = {"prompts": ["Hi"], "chat": True}
    for setting in ({"chat_template": "chatml"}, {"chat_template_kwargs": OFF}):
        job = LoraJob(name="a", data={"path": "a"} | setting, eval_fraction=0.1)
        with pytest.raises(ConfigError, match="by the tokenizer's chat template"):
            RunConfig(model="m", jobs=[job], samples=samples)
