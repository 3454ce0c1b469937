"""Data sets of other tools become `data`, or it is said what is missing."""

import json

import pytest

from jaxlora.errors import ConfigError
from tests.jaxlora.migrate.texts import AXOLOTL, MODEL


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
        ("path: 'd/*.jsonl'", {"path": "d/*.jsonl"}, "join the files d/*.jsonl"),
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
            {"kind": "messages"},
            "the speaker 'model' was read as the role 'assistant'",
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
                "prompt": "{% if input is defined and input %}{{ instruction }} "
                "{{ input }} {% else %}{{ instruction }} {% endif %}",
                "completion": "output",
            },
            "datasets.0.type.system_prompt: Write it into prompt",
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
            }
            | CHAT,
            "dataset: fields.system: s: put it into",
        ),
        (
            "chats",
            {"path": "info/c.json", "kind": "messages", "messages": "talk"},
            "{'role': 'who', 'content': 'said'}. Rename them",
        ),
        (
            "chats",
            {"path": "info/c.json", "kind": "messages", "messages": "talk"},
            "the speaker 'Ann' was read as the role 'assistant'",
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
