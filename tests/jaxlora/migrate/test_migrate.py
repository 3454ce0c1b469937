"""Settings of other tools become run files, and nothing is left out in silence."""

import contextlib
import itertools
import json
import pathlib
import re

import pytest

from jaxlora.cli.main import main
from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config import RunConfig
from jaxlora.config.run_file import load_run
from jaxlora.errors import ConfigError
from jaxlora.migrate import migrate_file
from tests import tiny

EXAMPLES = pathlib.Path(__file__).parent / "examples"
FILES = sorted({*EXAMPLES.iterdir()} - {*EXAMPLES.glob("*.run.yaml")})
AXOLOTL = "base_model: m\nadapter: lora\nlearning_rate: 1e-4\n"
ON_FILE = AXOLOTL + "datasets: [{path: a.jsonl, type: alpaca}]\n"
ON_DATA = "model_name_or_path: m\nfinetuning_type: lora\ndataset: a\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_becomes_its_run_file(file):
    """Each byte of it; the defaults of the other tool are written out."""
    wanted = EXAMPLES / f"{file.stem}.run.yaml"
    assert migrate_file(file).text(file.name) == wanted.read_text()
    assert isinstance(load_run(wanted), RunConfig)


def test_the_folder_of_an_adapter_is_its_settings():
    file = EXAMPLES / "adapter_config.json"
    assert migrate_file(EXAMPLES).run_file == migrate_file(file).run_file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_key_is_used_or_named(tmp_path, file):
    """A key that nobody knows, and each of the others alone, is never just dropped."""

    def convert(**changes):
        (tmp_path / "other.json").write_text(json.dumps(given | changes))
        migration = migrate_file(tmp_path / "other.json")
        return migration.run_file, migration.left_out, migration.to_do

    given = parse_yaml(file.read_text(), file.name) | {"a_new_key": 3}
    before = convert()
    assert "not known" in before[1]["a_new_key"]
    odd_values = itertools.cycle([3, [1], {"a": 1}, "-"])
    for key, value in given.items():
        if value in (None, "", False, [], {}):
            continue
        with contextlib.suppress(ConfigError):  # A wrong value is at most refused.
            convert(**{key: next(odd_values)})
        with contextlib.suppress(ConfigError):  # Some cannot be left out.
            assert convert(**{key: None}) != before or key in IS_DEFAULT, key


# Keys whose values in the examples are the other tool's defaults.
IS_DEFAULT = {
    "finetuning_type",
    *("num_train_epochs", "lora_target", "lr_scheduler", "bias", "stage", "lora_r"),
    *("cutoff_len", "lora_alpha", "init_lora_weights", "gradient_accumulation_steps"),
    *("lora_target_linear", "sample_packing", "output_dir", "lora_rank"),
}


def test_the_command(tmp_path, capsys):
    source, out = EXAMPLES / "axolotl_alpaca.yml", tmp_path / "run.yaml"
    assert main(["migrate", str(source)]) == 0
    printed = capsys.readouterr().out
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    assert out.read_text() == printed
    ended = capsys.readouterr()
    assert f"next: jaxlora plan {out}" in ended.out
    assert "left out: evals_per_epoch: 4: eval_every is a number" in ended.err
    assert "to do: batch_size counts the samples" in ended.err
    assert main(["migrate", str(source), "-o", str(out)]) == 1
    assert "File exists" in capsys.readouterr().err


BREAKS = ("\n", "\r", "\r\n", "\x85", "\u2028", "\u2029", "\x0b", "\x1b[2J", "\u202e")


@pytest.mark.parametrize("line_break", BREAKS)
def test_a_line_break_in_a_key_or_a_value(tmp_path, capsys, line_break):
    """It stays in its comment, or in its text."""
    forged = f"x{line_break}output_dir: forged"
    values = {
        "base_model": forged,
        "adapter": "lora",
        "learning_rate": 1e-4,
        "datasets": [{"path": forged, "name": forged, forged: 3, "type": forged}],
        "eval_steps": forged,
        "optimizer": forged,
        "special_tokens": {"eos_token": forged},
        forged: forged,
    }
    source, out = tmp_path / f"other{line_break}output_dir.json", tmp_path / "run.yaml"
    source.write_text(json.dumps(values))
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    written = out.read_bytes().decode()
    run = parse_yaml(written, "run.yaml")
    assert run == json.loads(json.dumps(migrate_file(source).run_file))
    assert run["model"] == forged and run["output_dir"] == "./model-out"
    err = capsys.readouterr().err
    assert not re.search("^output_dir: forged", written + err, re.MULTILINE)
    for text in (written, err):
        lines = text.replace("\n", "")
        assert all(c.isprintable() for c in lines), text


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000, "9" * 3000])
@pytest.mark.parametrize(
    "text",
    [
        AXOLOTL + "datasets: [{path: a.jsonl, split: 'train[:N]'}]\n",
        ON_FILE + "micro_batch_size: N\ngradient_accumulation_steps: N\n",
        ON_FILE + "lora_r: N\nsequence_len: N\nsample_packing: true\n",
        ON_DATA + "lora_rank: N\nval_size: N\nmax_samples: N\n",
        "model_name_or_path: m\nuse_peft: true\nlora_r: N\nwarmup_steps: N\n",
        "peft_type: LORA\nbase_model_name_or_path: m\nr: N\n",
    ],
)
def test_long_numbers(tmp_path, text, number):
    """They are named or refused, never computed with."""
    path = tmp_path / "other.yml"
    path.write_text(text.replace("N", number))
    try:
        migration = migrate_file(path)
    except ConfigError as error:
        assert "digits" in str(error)
    else:
        assert "datasets.0.split" in migration.text("other.yml")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "phi"}, "model_type='phi'. Supported: llama"),
        ({"num_local_experts": 8}, "mixture-of-experts models are not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq', which"),
    ],
)
def test_a_model_that_is_here_is_read(tmp_path, change, match):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | change))
    path = tmp_path / "other.yml"
    path.write_text(ON_DATA.replace(": m\n", f": {tmp_path}\n"))
    with pytest.raises(ConfigError, match=re.escape(match)):
        migrate_file(path)


@pytest.mark.parametrize(
    ("targets", "rank"),
    [
        ("lora_target_linear: true", "full"),
        ("lora_target_modules: [q_proj]", None),
        ("lora_target_modules: [nothing]", None),
    ],
)
def test_the_rank_of_experts_is_that_of_the_adapter(tmp_path, targets, rank):
    """As in PEFT; here it would be divided by the experts that a token passes."""
    models = pathlib.Path(__file__).parents[2] / "golden" / "models"
    path = tmp_path / "other.yml"
    text = ON_FILE.replace(": m\n", f": {models / 'olmoe'}\n")
    path.write_text(f"{text}{targets}\n")
    assert migrate_file(path).job.get("expert_rank") == rank
    path.write_text(path.read_text().replace("olmoe", "llama2"))
    assert "expert_rank" not in migrate_file(path).job


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("train.py", "base_model: m\n", "docs/howto/from_peft.md"),
        ("train.ipynb", '{"cells": []}', "docs/howto/from_peft.md"),
        ("train", "#!/bin/python\nfrom trl import SFTTrainer\n", "from_peft.md"),
        ("train.txt", "# Trains.\nimport torch\n\nbase_model = 'm'\n", "from_peft.md"),
        ("other.yml", "- 3\n", "is not a mapping"),
        ("folder/nothing.yml", "", "nothing.yml cannot be read: No such file"),
        ("dataset_info.json", "{", "dataset_info.json cannot be read: "),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, match):
    path = tmp_path / name
    if text:
        path.write_text(text)
    if name == "dataset_info.json":
        path = tmp_path / "other.yml"
        path.write_text(f"{ON_DATA}dataset_dir: {tmp_path}\n")
    with pytest.raises(ConfigError, match=re.escape(match)):
        migrate_file(path)
