"""Data sets of other tools become `data`, or it is said what is missing."""

import json

import pytest

from jaxlora.errors import ConfigError
from tests.jaxlora.migrate.texts import AXOLOTL, MODEL, ON_DATA, ON_FILE


@pytest.mark.parametrize(
    ("dataset", "wanted", "said"),
    [
        ("path: a.jsonl, split: train", {"path": "a.jsonl"}, ""),
        ("path: a.jsonl, split: 'train[:50]'", {"path": "a.jsonl", "limit": 50}, ""),
        ("path: a.json, split: 'train[:5%]'", {"path": "a.json"}, "datasets.0.split"),
        ("path: json, data_files: a.jsonl", {"path": "a.jsonl"}, ""),
        (
            "path: me/d.v1",
            {"path": "me/d.v1", "split": "train"},
            "is a data set on the",
        ),
        (
            "path: me/d, split: x, name: en, revision: v1",
            {"path": "me/d", "split": "x", "subset": "en", "revision": "v1"},
            "is a data set on the hub",
        ),
        (
            "path: me/d, data_files: a.jsonl",
            {"path": "a.jsonl"},
            "download a.jsonl of me/d",
        ),
        (
            "path: json, data_files: {train: a.jsonl, test: b.jsonl}",
            {"path": "a.jsonl"},
            "datasets.0.data_files.test: The split train is read",
        ),
        ("path: ./d, data_files: a.csv", {"path": "a.csv"}, "find a.csv of ./d"),
        ("path: 's3://b/a.json'", {"path": "s3://b/a.json"}, "download s3://b/a.json"),
        ("path: d/a.txt", {"path": "d/a.txt"}, "convert d/a.txt to one of .jsonl"),
        ("path: 'd/*.jsonl'", {"path": "d/*.jsonl"}, "list the files d/*.jsonl"),
    ],
)
def test_where_records_are(migrated, dataset, wanted, said):
    text = f"{AXOLOTL}datasets: [{{{dataset}, type: chat_template}}]\n"
    migration, run = migrated(text)
    data = run.jobs[0].data
    assert data.model_dump(exclude_defaults=True) == wanted | {"kind": "messages"}
    assert said in migration.text("a.yml")
    if not said:
        assert "data" not in str(migration.to_do) and not migration.left_out


@pytest.mark.parametrize(
    ("kind", "wanted", "said"),
    [
        ("alpaca", {"kind": "alpaca"}, ""),
        ("'alpaca:phi'", {"kind": "alpaca"}, "type 'alpaca:phi' is read as 'alpaca'"),
        ("chat_template.default", {"kind": "messages"}, ""),
        ("sharegpt", {"kind": "messages", "messages": "conversations"}, ""),
        ("completion, field: body", {"kind": "text", "text": "body"}, "Divide long"),
        ("oasst", {}, "type 'oasst' has no counterpart"),
        ("chat_template, field_messages: m", {"kind": "messages", "messages": "m"}, ""),
        (
            "chat_template, message_property_mappings: {role: from, content: value}",
            {"kind": "messages"},
            "",
        ),
        (
            "chat_template, message_field_role: who, message_field_content: said",
            {"kind": "messages"},
            "{'role': 'who', 'content': 'said'}. Rename them",
        ),
        (
            "chat_template, roles: {assistant: [gpt, model], user: [human]}",
            {"kind": "messages", "roles": {"model": "assistant"}},
            "",
        ),
        (
            "chat_template, roles: {assistant: [gpt], critic: [judge]}",
            {"kind": "messages"},
            "the speaker 'judge' was read as the role 'critic'",
        ),
        (
            "chat_template, chat_template: llama3",
            {"kind": "messages", "chat_template": "llama3"},
            "",
        ),
        (
            "chat_template, chat_template: jinja, chat_template_jinja: '{{ bos }}'",
            {"kind": "messages", "chat_template": "{{ bos }}"},
            "",
        ),
        (
            "chat_template, chat_template: gemma",
            {"kind": "messages"},
            "datasets.0.chat_template: 'gemma' is not used. The tokenizer's own",
        ),
        (
            "chat_template, roles_to_train: [user, assistant]",
            {"kind": "messages"},
            "datasets.0.roles_to_train: loss_on",
        ),
        (
            "chat_template, drop_system_message: true",
            {"kind": "messages"},
            "datasets.0.drop_system_message: Change the records",
        ),
        (
            "chat_template, field_system: s",
            {"kind": "messages"},
            "datasets.0.field_system: Set system in data",
        ),
        (
            "{field_instruction: q, field_output: a, "
            "format: 'Q: {instruction} {{A:', no_input_format: '{instruction}'}",
            {
                "kind": "prompt_completion",
                "prompt": "Q: {{ q }} {A:",
                "completion": "a",
            },
            "",
        ),
        (
            "{format: '{instruction}, {input}', no_input_format: '{instruction}'}",
            {
                "kind": "prompt_completion",
                "prompt": "{% if input is defined and input %}{{ instruction }}, "
                "{{ input }}{% else %}{{ instruction }}{% endif %}",
                "completion": "output",
            },
            "",
        ),
        (
            "{format: '{system}', system_prompt: Be kind.}",
            {"kind": "prompt_completion", "completion": "output"},
            "the formats '{system}' and",
        ),
        (
            "{system_prompt: Be kind.}",
            {
                "kind": "prompt_completion",
                "prompt": "Be kind.{% if input is defined and input %}{{ instruction }}"
                " {{ input }} {% else %}{{ instruction }} {% endif %}",
                "completion": "output",
            },
            "",
        ),
        (
            "{system_prompt: Be kind., field_system: s, system_format: '<{system}>', "
            "format: '{instruction}', no_input_format: '{instruction}'}",
            {
                "kind": "prompt_completion",
                "prompt": "{% if s is defined and s %}<{{ s }}>{% else %}{% endif %}"
                "{{ instruction }}",
                "completion": "output",
            },
            "datasets.0.type.system_prompt: The system prompt of each record",
        ),
        (
            "{field_system: s t, format: '{instruction}'}",
            {"kind": "prompt_completion", "completion": "output"},
            "cannot be converted",
        ),
        (
            "alpaca_w_system.load_open_orca",
            {
                "kind": "prompt_completion",
                "prompt": "{% if system_prompt %}### System:\n{{ system_prompt }}\n"
                "{% endif %}### Human:\n{{ question }}\n### Assistant:\n",
                "completion": "response",
            },
            "",
        ),
    ],
)
def test_types_of_axolotl(migrated, kind, wanted, said):
    text = f"{AXOLOTL}datasets: [{{path: a.jsonl, type: {kind}}}]\n"
    migration, run = migrated(text)
    data = run.jobs[0].data.model_dump(exclude_defaults=True)
    assert data == {"path": "a.jsonl"} | wanted
    assert said in migration.text("a.yml")
    if not said:
        assert "data" not in str(migration.to_do) and not migration.left_out


INFO = {
    "plain": {"file_name": "a.json"},
    "hub": {"hf_hub_url": "me/d", "subset": "en", "split": "x", "num_samples": 9},
    "fields": {
        "file_name": "b.jsonl",
        "columns": {"prompt": "q", "query": "more", "response": "a", "system": "s"},
    },
    "chats": {
        "file_name": "c.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "tools": "tools"},
        "tags": {"role_tag": "who", "content_tag": "said", "assistant_tag": "Ann"},
    },
    "texts": {"file_name": "d.jsonl", "columns": {"prompt": "body"}},
    "told": {
        "file_name": "f.json",
        "formatting": "sharegpt",
        "columns": {"system": "about", "history": "past"},
        "tags": {"system_tag": "sys", "function_tag": "fn"},
    },
    "about": {"file_name": "g.json", "columns": {"prompt": "body", "system": "s"}},
    "pairs": {"file_name": "e.json", "ranking": True},
    "nowhere": {"script_url": "f"},
}
CHAT = {"chat": True}


@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [
        ("plain", {"path": "info/a.json", "kind": "alpaca"} | CHAT, ""),
        (
            "hub",
            {"path": "me/d", "subset": "en", "split": "x", "limit": 9, "kind": "alpaca"}
            | CHAT,
            "is a data set on the hub",
        ),
        (
            "fields",
            {
                "path": "info/b.jsonl",
                "kind": "prompt_completion",
                "prompt": "{% if more is defined and more %}{{ q }}\n{{ more }}"
                "{% else %}{{ q }}{% endif %}",
                "completion": "a",
                "system": "s",
            }
            | CHAT,
            "",
        ),
        (
            "told",
            {
                "path": "info/f.json",
                "kind": "messages",
                "messages": "conversations",
                "roles": {"sys": "system", "fn": "function_call"},
                "system": "about",
            },
            "dataset: told.history: past: put it into",
        ),
        (
            "about",
            {"path": "info/g.json", "kind": "text", "text": "body"},
            "dataset: about.system: s: texts have no such message",
        ),
        (
            "chats",
            {
                "path": "info/c.json",
                "kind": "messages",
                "messages": "talk",
                "roles": {"Ann": "assistant"},
            },
            "{'role': 'who', 'content': 'said'}. Rename them",
        ),
        (
            "texts",
            {"path": "info/d.jsonl", "kind": "text", "text": "body"},
            "there is no field of answers",
        ),
        (
            "nowhere",
            {"path": "records.jsonl", "kind": "alpaca"} | CHAT,
            "is in none of a file and the Hugging Face hub",
        ),
    ],
)
def test_dataset_info(tmp_path, monkeypatch, migrated, name, wanted, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "info").mkdir()
    (tmp_path / "info/dataset_info.json").write_text(json.dumps(INFO))
    text = f"{MODEL}stage: sft\ndataset_dir: info\ndataset: {name}\n"
    migration, run = migrated(text)
    assert run.jobs[0].data.model_dump(exclude_defaults=True) == wanted
    assert said in migration.text("a.yml")
    if not said:
        assert "data" not in str(migration.to_do) and not migration.left_out


@pytest.mark.parametrize(
    ("info", "match"), [(json.dumps(INFO), "records with preferences"), ("{", "cannot")]
)
def test_dataset_info_that_cannot_be_used(tmp_path, monkeypatch, migrated, info, match):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset_info.json").write_text(info)
    with pytest.raises(ConfigError, match=match):
        migrated(f"{MODEL}stage: sft\ndataset_dir: .\ndataset: pairs\n")


A, B = "a.jsonl", "b.jsonl"
TRL = MODEL + "use_peft: true\n"
TEXT = {"kind": "text"}
SEVERAL = {
    "axolotl": (
        AXOLOTL + "datasets: [{path: a.jsonl, type: alpaca}, {path: b.jsonl}]\n",
        "data",
        [{"path": A, "kind": "alpaca"}, {"path": B} | TEXT],
    ),
    "axolotl held out": (
        ON_FILE + "test_datasets: [{path: a.jsonl}, {path: b.jsonl}]\n",
        "eval_data",
        [{"path": A} | TEXT, {"path": B} | TEXT],
    ),
    "axolotl files": (
        AXOLOTL + "datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}]",
        "data",
        [{"path": A} | TEXT, {"path": B} | TEXT],
    ),
    "axolotl splits": (
        AXOLOTL + "datasets: [{path: json, data_files: {x: a.jsonl, y: b.jsonl}}]",
        "data",
        [{"path": A} | TEXT, {"path": B} | TEXT],
    ),
    "axolotl texts": (
        AXOLOTL + "pretraining_dataset: [{path: a.jsonl}, {path: b.jsonl}]",
        "data",
        [{"path": A} | TEXT, {"path": B} | TEXT],
    ),
    "axolotl template": (
        AXOLOTL
        + "chat_template: chatml\ntrain_on_inputs: true\n"
        + "datasets: [{path: a.jsonl, type: chat_template}, {path: b.jsonl}]",
        "data",
        [
            {
                "path": A,
                "kind": "messages",
                "chat_template": "chatml",
                "loss_on": "all",
            },
            {"path": B, "loss_on": "all"} | TEXT,
        ],
    ),
    "llama_factory": (
        ON_DATA.replace("dataset: a", "dataset: a, b\nmask_history: true"),
        "data",
        [{"path": f"data/{n}.json", "loss_on": "last"} for n in "ab"],
    ),
    "llama_factory list": (
        ON_DATA.replace("dataset: a", "dataset: [a, b]\nmax_samples: 5"),
        "data",
        [{"path": f"data/{n}.json", "limit": 5} for n in "ab"],
    ),
    "llama_factory held out": (
        ON_DATA + "eval_dataset: a,b\nmix_strategy: interleave_over\n",
        "eval_data",
        [{"path": "data/a.json"}, {"path": "data/b.json"}],
    ),
    "trl": (
        TRL + "datasets: [{path: a.jsonl}, {path: b.jsonl}]\ndataset_text_field: t",
        "data",
        [{"path": A, "text": "t"}, {"path": B, "text": "t"}],
    ),
    "trl files": (
        TRL + "datasets: [{path: m/d, data_files: {train: [a.jsonl, b.jsonl]}}]\n",
        "data",
        [{"path": A}, {"path": B}],
    ),
}


@pytest.mark.parametrize(("text", "key", "wanted"), SEVERAL.values(), ids=SEVERAL)
def test_all_data_sets_are_kept(migrated, text, key, wanted):
    """Each with its own settings, one after the other, as the tools join them."""
    migration, run = migrated(text)
    data = getattr(run.jobs[0], key)
    assert data.mix == "concat" and data.probabilities is None
    assert [one.model_dump(exclude_defaults=True) for one in data.sets] == wanted
    assert "dataset" not in str(migration.left_out)


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        ("interleave_under", "first_exhausted"),
        ("interleave_over", "all_exhausted"),
        ("interleave_once", "all_exhausted_without_replacement"),
    ],
)
def test_interleaving_of_llama_factory(migrated, strategy, wanted):
    text = ON_DATA.replace("dataset: a", "dataset: a,b")
    text += f"mix_strategy: {strategy}\ninterleave_probs: 0.3,0.7\n"
    _, run = migrated(text)
    data = run.jobs[0].data
    assert (data.mix, data.stopping_strategy) == ("interleave", wanted)
    assert data.probabilities == (0.3, 0.7)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("interleave_probs: 0.5,0.5\n", "interleave_probs: mix_strategy is concat"),
        ("mix_strategy: stir\n", "mix_strategy: 'stir' is not known"),
        (
            "mix_strategy: interleave_over\ninterleave_probs: '0.5, x'\n",
            "interleave_probs: '0.5, x': give numbers",
        ),
        (
            "mix_strategy: interleave_over\ninterleave_probs: 0.5,0.2,0.3\n",
            "there are 3 shares, and 2 files or data sets",
        ),
    ],
)
def test_shares_that_cannot_be_kept(migrated, settings, said):
    text = ON_DATA.replace("dataset: a", "dataset: a,b") + settings
    migration, run = migrated(text)
    assert said in migration.text("a.yml") and run.jobs[0].data.probabilities is None


def test_a_limit_of_several_files(migrated):
    files = "path: json, data_files: [a.jsonl, b.jsonl], split: 'train[:50]'"
    migration, run = migrated(f"{AXOLOTL}datasets: [{{{files}}}]\n")
    assert [one.limit for one in run.jobs[0].data.sets] == [50, 50]
    assert "had the first 50 records of 2 files together" in migration.text("a.yml")


OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{TRL}datasets: [{{path: a.jsonl}}]\nchat_template_kwargs: ", [OFF]),
        (
            f"{AXOLOTL}datasets: [{{path: a.jsonl, type: chat_template}}, {{path: b."
            "jsonl}]\nchat_template_kwargs: ",
            [OFF, {}],
        ),
        (ON_DATA, [OFF]),
    ],
)
def test_values_of_variables_of_chat_templates(migrated, text, wanted):
    text += "enable_thinking: false" if text == ON_DATA else "{enable_thinking: false}"
    migration, run = migrated(text)
    assert [one.chat_template_kwargs for one in run.jobs[0].data.sets] == wanted
    assert "thinking" not in str(migration.left_out)


def test_a_template_that_no_data_set_uses(migrated):
    migration, _ = migrated(f"{ON_FILE}chat_template: chatml\n")
    assert migration.left_out["chat_template"] == "No data set has messages."
