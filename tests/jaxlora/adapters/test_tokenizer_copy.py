"""The tokenizer beside an adapter has the chat template of the job."""

import json

import pytest

from jaxlora.adapters.files.export_record import (
    ExportRecord,
    check_replaceable,
    read_export,
)
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.files.tokenizer_copy import TokenizerCopy, job_template
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokenizer_files import read_template
from jaxlora.errors import AdapterError

OWN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
NAMED = {"default": OWN, "tool_use": OWN + "{{ tools }}"}
TEMPLATES = [None, OWN, NAMED]


@pytest.fixture
def written(make_adapter, folder, linear_shapes, tmp_path):
    """Exports an adapter with a tokenizer, as a run does."""

    def write(template, name="adapter"):
        return export_peft(
            make_adapter(),
            tmp_path / name,
            base_model=str(folder),
            linear_names=list(linear_shapes),
            record=ExportRecord(job="job", step=3),
            card="<!-- Written by jaxlora. Remove this line to keep your changes. -->",
            tokenizer=TokenizerCopy(folder=folder, template=template),
        )

    return write


@pytest.mark.parametrize("where", ["file", "config"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tokenizer_of_the_folder(written, folder, template, where, linear_shapes):
    """Whether the base has its own template in a file or in the tokenizer's config."""
    base = read_template(folder)
    assert base is not None
    if where == "file":
        (folder / "chat_template.jinja").write_text(base)
    out = written(template)
    assert read_template(out) == (base if template is None else template)
    assert load_tokenizer(out).encode("a b") == load_tokenizer(folder).encode("a b")
    assert import_peft(out, linear_shapes).modules
    # transformers takes the file before the config, so both must not differ.
    config = json.loads((out / "tokenizer_config.json").read_text())
    is_file = (out / "chat_template.jinja").exists()
    assert template is None or is_file != ("chat_template" in config)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_merged_model_has_the_template(written, folder, template, tmp_path):
    merged = merge_adapter(folder, written(template), tmp_path / "merged")
    wanted = read_template(folder) if template is None else template
    assert read_template(merged) == wanted
    # A template alone, as a user may put it beside an adapter.
    alone = written(template, "alone")
    for path in alone.glob("*token*"):
        path.unlink()
    merged = merge_adapter(folder, alone, tmp_path / "merged2")
    has_file = (alone / "chat_template.jinja").exists()
    assert read_template(merged) == (OWN if has_file else read_template(folder))


def test_only_the_files_that_were_written_are_replaced(written):
    out = written(OWN)
    assert {"tokenizer.json", "chat_template.jinja"} <= read_export(out).files.keys()
    check_replaceable(written(NAMED))
    (out / "tokenizer_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="holds files that jaxlora did not write"):
        check_replaceable(out)
    other = written(None, "other")
    (other / "chat_template.jinja").write_text("mine")
    with pytest.raises(AdapterError, match="holds files that jaxlora did not write"):
        check_replaceable(other)


def test_a_base_without_a_tokenizer(written, folder):
    for path in (*folder.glob("*token*"), *folder.glob("*.jinja")):
        path.unlink()
    assert not {*written(OWN).glob("*token*")} | {*written(OWN).glob("*.jinja")}


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"path": "a"}, None),
        ({"path": "a", "chat_template": "chatml"}, "C"),
        ({"datasets": [{"path": "a"}, {"path": "b", "chat_template": "x"}]}, "X"),
        ({"datasets": [{"chat_template": "x"}, {"chat_template": "chatml"}]}, "X"),
    ],
)
def test_the_template_of_a_job(data, wanted):
    assert job_template(data, {"chatml": "C", "x": "X"}) == wanted
