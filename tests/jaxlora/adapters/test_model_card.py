"""A model card says what the adapter is of, and leads with YAML for the hub."""

import ast

import huggingface_hub
import markdown_it
import pytest
import yaml

from jaxlora.adapters.files.base_name import base_name, last_part, run_base
from jaxlora.adapters.files.export_record import check_replaceable
from jaxlora.adapters.files.model_card import is_our_card, model_card, write_card
from jaxlora.config import LoraJob
from jaxlora.errors import AdapterError
from jaxlora.printable import one_line


def card(base_model="someone/model", path="someone/records", **figures) -> str:
    job = LoraJob(name="support", data={"path": path}, rank=4, learning_rate=3e-4)
    return model_card(
        name="support",
        base=base_name(base_model, "abc123"),
        job=job.model_dump(mode="json"),
        figures={"held-out loss": None} | figures,
        version="1.2.3",
    )


def test_a_base_that_is_one_part():
    base = base_name("someone/model", None)
    text = model_card(
        name="a", base=base, job={}, figures={}, version="1", is_part=True
    )
    assert "base = AutoModelForImageTextToText.from_pretrained(" in text


def front(text: str) -> dict:
    _, block, _ = text.split("---\n", 2)
    return yaml.safe_load(block)


def test_front_matter():
    found = front(card())
    assert found["base_model"] == "someone/model"
    assert found["library_name"] == "peft"
    assert found["datasets"] == ["someone/records"]
    assert "base_model:adapter:someone/model" in found["tags"]
    # The hub's own client reads the same.
    data = huggingface_hub.ModelCard(card()).data
    assert (data.base_model, data.library_name) == ("someone/model", "peft")


@pytest.mark.parametrize("path", ["/home/user/records.jsonl", "data/records.jsonl"])
def test_a_path_is_not_told(path):
    """It may hold a user's name, and is no model or data set of the hub."""
    text = card(base_model="/home/user/base", path=path)
    assert front(text).keys() == {"library_name", "pipeline_tag", "tags"}
    assert "`records.jsonl`" in text and path not in text


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("someone/model", ("someone/model", "abc", True)),
        ("/home/user/base", ("base", None, False)),
        ("~/models/base/", ("base", None, False)),
        ("../base", ("base", None, False)),
        ("C:\\Users\\me\\base", ("base", None, False)),
        ("/", ("unknown", None, False)),
        (
            f"/home/user/.cache/huggingface/hub/models--a--b-c/snapshots/{COMMIT}",
            ("a/b-c", COMMIT, True),
        ),
    ],
)
def test_the_name_of_a_base(source, wanted):
    for found in (base_name(source, "abc"), run_base(source, "abc")):
        assert (found.name, found.revision, found.is_on_hub) == wanted
        # A folder is loaded again by the path that was given.
        assert found.path == (found.name if found.is_on_hub else source)


def test_a_folder_of_the_form_of_a_hub_id(tmp_path, monkeypatch):
    """It is known by being there, or by its run, which knows commits of the hub."""
    assert run_base("models/tiny", None).name == "tiny"
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_name("models/tiny").name == "tiny"


HOSTILE = (
    'x"); import os; os.system("y") #',
    "x'); import os #",
    "x\\",
    "x\n```\nimport os",
    "x` ![y](z) ``` <script>",
    "x|y|z",
    "a: b\n---\nlicense: mit\n",
    "*x* [y](z) &amp; https://z.z",
    "\x1b[2J\u202e\u2028x",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_code_or_markup(text):
    """Neither in the example nor in the front matter, the tables or the headings."""
    name = f"/base/{text}"
    job = {"data": {"path": text}, "target_modules": [text], "lr_schedule": text}
    written = model_card(
        name=text,
        base=base_name(name),
        job=job,
        figures={"loss": text, text: 1},
        version="1",
    )
    assert front(written).keys() == {"library_name", "pipeline_tag", "tags"}
    assert all(line.isprintable() for line in written.splitlines())
    body = written.split("---\n", 2)[2]
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(body)
    [example] = [token.content for token in tokens if token.type == "fence"]
    *_, base, model = statements = ast.parse(example).body
    assert len(statements) == 5 and isinstance(model, ast.Assign)
    assert isinstance(base, ast.Assign) and isinstance(base.value, ast.Call)
    assert ast.literal_eval(base.value.args[0]) == base_name(name).name
    inner = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in inner} <= {"text", "code_inline", "text_special"}
    assert sum(token.type == "heading_open" for token in tokens) == 5
    assert sum(token.type == "td_open" for token in tokens) == 2 * (2 + 2)
    shown = [token.content for token in inner if token.type == "code_inline"]
    names = {one_line(n) for n in (text, last_part(text), base_name(name).name)}
    assert shown.count(one_line(text)) >= 4 and set(shown) <= names


def test_a_revision_is_a_literal():
    job = {"data": {"path": "d.jsonl"}}
    written = model_card(
        name="a",
        base=base_name("someone/model", '"); x("'),
        job=job,
        figures={},
        version="1",
    )
    assert """revision='"); x("')""" in written


def test_figures_and_settings():
    text = card(**{"held-out loss": 1.23456, "optimizer steps": 70})
    assert "| held-out loss | 1.235 |" in text and "| optimizer steps | 70 |" in text
    assert "| rank | 4 |" in text and "| learning_rate | 0.0003 |" in text
    assert "| steps |" not in text  # a setting that was not given
    assert "trained with jaxlora 1.2.3" in text and "`abc123`" in text
    assert "Nothing was measured." in card()


def test_a_card_is_replaced_unless_it_is_claimed(make_adapter, export):
    folder = export(make_adapter())
    write_card(folder, card())
    assert is_our_card(folder / "README.md")
    check_replaceable(folder)
    write_card(folder, card().replace("<!-- Written by jaxlora", "<!-- Mine"))
    assert not is_our_card(folder / "README.md")
    with pytest.raises(AdapterError, match="files that jaxlora did not write"):
        check_replaceable(folder)
