"""The `jaxlora` command: what a stranger types, and what comes back."""

import json
import logging
import pathlib
import re
import shutil
import socket

import numpy as np
import pytest
import safetensors.numpy
import yaml

from jaxlora.cli.main import main
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.config.run_file import load_run
from jaxlora.config.strict import StrictModel
from tests import tiny

DOCS = pathlib.Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a run file, and what the run left."""
    folder = tmp_path_factory.mktemp("cli")
    one_layer = tiny.CONFIG | {"num_hidden_layers": 1}
    model = tiny.write_model(folder / "model", config=one_layer)
    run = {
        "model": str(model),
        "output_dir": str(folder / "run"),
        "microbatch_tokens": 256,
        "block_tokens": 16,
        "slot_rank": 3,
        "defaults": {"steps": 2, "max_length": 96, "eval_fraction": 0.1},
        "jobs": [
            {
                "name": name,
                "data": {"path": tiny.write_records(folder / f"{name}.jsonl", 12, i)},
                "rank": 2 + i,
                "target_modules": ["q_proj"],
            }
            for i, name in enumerate(("first", "second"))
        ],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder


def test_a_port_of_the_page_that_is_taken_is_refused(folder, tmp_path, capsys):
    """Before anything is written, as it is when the port is none at all."""
    train = ["train", str(folder / "run.yaml"), "--output-dir", str(tmp_path / "out")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*train, "--page", f"{port}"]) == 1
    assert f"--page: port {port} of 127.0.0.1 cannot" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*train, "--page", "70000"])
    assert "70000 is no port" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def said(capsys, *arguments) -> str:
    assert main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["train", "plan", "convert", "merge", "export", "inspect"]),
        (["train"], ["run_file", "--resume", "--output-dir", "--mesh"]),
        (["plan"], ["run_file", "--mesh", "--steps", "--picture"]),
        (["convert"], ["quantized", "--dtype"]),
        (["merge"], ["base", "adapter", "out"]),
        (["export"], ["run_dir", "--job"]),
        (["inspect"], ["path"]),
    ],
)
def test_help(capsys, command, words):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)


def test_train_ends_with_a_table(folder, capsys):
    """Settings of the command line are recorded; they may be on both sides of options.

    Resumed without them, it is another run.
    """
    again = folder / "again"
    options = "jobs.second.lora_r=1", "--output-dir", again, "defaults.steps=1"
    assert main(list(map(str, ["train", folder / "run.yaml", *options]))) == 0
    text, log = capsys.readouterr()
    overridden = "jobs.second.lora_r=1 (before: 3); defaults.steps=1 (before: 2)"
    assert f"overridden: {overridden}\n" in log
    assert "2 adapters, trained together on one base" in text
    assert re.search(r"first .* 1/1 .* → .* → .*finished", text)
    assert f"PEFT folder: {again / 'adapters' / 'second'}" in text
    kept = (again / "run_file.yaml").read_text()
    run_file = (folder / "run.yaml").read_text()
    first, second = options[0], options[-1]
    assert kept == f"# overridden: {first}\n# overridden: {second}\n{run_file}"
    jobs = load_run(again / "settings.yaml").jobs
    assert [(job.rank, job.steps) for job in jobs] == [(2, 1), (1, 1)]
    resumed = "train", folder / "run.yaml", "--output-dir", again, "--resume"
    assert main(list(map(str, resumed))) == 1
    assert "rank" in capsys.readouterr().err


def test_replan_is_for_a_run_of_one_process_that_goes_on(folder, tmp_path, capsys):
    assert main(["train", str(folder / "run.yaml"), "--replan"]) == 1
    assert "--replan chooses anew for a run that goes on. Give --resume" in (
        capsys.readouterr().err
    )
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run |= {"sweep": {"groups": 2}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    for option in ("--replan", "--drop-state"):
        given = ["train", str(tmp_path / "run.yaml"), "--resume", option]
        assert main(given) == 1
        error = f"{option} changes a run of one process, and sweep.groups is 2."
        assert error in capsys.readouterr().err


def test_logging_is_as_before(capsys):
    """A command may run in a process that logs on its own."""
    logger = logging.getLogger("jaxlora")
    before = list(logger.handlers), logger.level, logger.propagate
    assert main(["inspect", "/nowhere"]) == 1
    assert (list(logger.handlers), logger.level, logger.propagate) == before


def test_mistakes_are_one_line_and_exit_1(folder, capsys, tmp_path):
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run["jobs"][0]["rnk"] = 4
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(run))
    for arguments, message in [
        (["train", str(path)], "unknown key 'rnk'. Did you mean 'rank'?"),
        (["train", "nowhere.yaml"], "nowhere.yaml: this run file does not exist."),
        (["train", str(folder / "run.yaml")], "already holds a run"),
        (["inspect", str(folder / "run"), "a=1"], "a=1 is a setting of a run file"),
        (["plan", str(folder / "run.yaml"), "rank=1"], "Write defaults.rank=..."),
        (["inspect", str(folder / "first.jsonl")], "is neither a run file (.yaml) nor"),
        (["merge", str(folder / "model"), str(tmp_path), "x"], "is no PEFT folder"),
        (["export", str(tmp_path), "x"], "holds no run: there is no run.json"),
        (
            ["convert", str(folder / "model"), str(folder / "run")],
            "exists already. Remove it, or choose another name",
        ),
    ]:
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("jaxlora: error: ") or "\njaxlora: error: " in error
        assert "Traceback" not in error


def test_outputs_never_replace_what_is_read(folder, capsys, tmp_path):
    text = (folder / "run.yaml").read_text()
    (tmp_path / "settings.yaml").write_text(text)
    (tmp_path / "plan.png").symlink_to(folder / "first.jsonl")
    new_run = "train", tmp_path / "settings.yaml", "--output-dir", tmp_path
    picture = "plan", folder / "run.yaml", "--picture", tmp_path / "plan.png"
    for arguments, message in (
        (new_run, "settings.yaml of another origin, which a run would replace"),
        (picture, "would be replaced, and it is read as"),
    ):
        assert main([str(argument) for argument in arguments]) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "settings.yaml").read_text() == text


def test_inspect_of_a_model_whose_experts_share_tensors(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    folder = pathlib.Path(__file__).parents[2] / "golden" / "models" / "qwen3_6_moe"
    text = " ".join(said(capsys, "inspect", folder).split())
    assert "tensors missing │ none" in text
    assert "has_experts │ 2 layers: True" in text


def test_inspect(folder, capsys):
    text = said(capsys, "inspect", folder / "model")
    assert "hidden_size" in text and "tensors missing" in text and "none" in text
    text = said(capsys, "inspect", folder / "run" / "adapters" / "first")
    assert "PEFT adapter" in text and "q_proj" in text
    text = " ".join(said(capsys, "inspect", folder / "run").split())  # lines wrap
    assert "checkpoint after round 2" in text and "finished" in text
    text = said(capsys, "inspect", folder / "run.yaml", "jobs.second.rank=5")
    assert "microbatch_tokens" in text and "job second" in text
    assert re.search(r"rank\W+5\W", text)


def test_plan(folder, capsys, tmp_path):
    picture = tmp_path / "plan.png"
    text = said(capsys, "plan", folder / "run.yaml", "--picture", picture)
    assert re.search(r"first +10 .* 2 ", text)  # samples and steps
    for words in ("microbatches", "padding", "1 device"):
        assert words in text
    assert re.search(rf"wrote {picture}: microbatches 1 to (\d+) of \1\b", text)
    assert picture.read_bytes().startswith(b"\x89PNG")
    mesh = "data=2,fsdp=2"
    arguments = folder / "run.yaml", "--mesh", mesh, "--steps", 1
    text = said(capsys, "plan", *arguments, "--picture", picture)
    assert re.search(r"microbatches 1 to (\d+) of \1\b", text)
    assert mesh in text


def test_plan_needs_no_weights(folder, capsys, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run["model"] = str(tmp_path / "model")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    assert "microbatches" in said(capsys, "plan", path)


def test_plan_mistakes(folder, capsys, tmp_path):
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run["microbatch_tokens"] = 32
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(run))
    assert main(["plan", str(path)]) == 1
    assert "supports samples of at most 32. Raise microbatch" in capsys.readouterr().err
    whole = str(folder / "run.yaml")
    assert main(["plan", whole, "--picture", str(tmp_path / "plan.doc")]) == 1
    assert "plan.doc: a picture ends in one of .png" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", whole, "--steps", "0"])
    assert "'0' is not a positive integer" in capsys.readouterr().err
    assert main(["plan", whole, "--mesh", "stage=4"]) == 1
    assert "stage=4 needs a layer for each stage" in capsys.readouterr().err


def test_merge_and_convert(folder, capsys, tmp_path):
    adapter = folder / "run" / "adapters" / "second"
    text = said(capsys, "merge", folder / "model", adapter, tmp_path / "merged")
    assert text == f"wrote {tmp_path / 'merged'}\n"
    name = "model.layers.0.self_attn.q_proj"
    merged = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    lora = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    wanted = tiny.random_weights()[f"{name}.weight"] + 32 / 3 * b @ a
    np.testing.assert_allclose(merged[f"{name}.weight"], wanted, atol=1e-5)
    assert np.abs(b).max() > 0

    said(capsys, "convert", tmp_path / "merged", tmp_path / "bf16")
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_export_of_a_run_that_has_ended(folder, capsys, tmp_path):
    """Its jobs leave as the run itself exported them, again and again."""
    out = tmp_path / "out"
    for _ in range(2):
        text = said(capsys, "export", folder / "run", out)
        assert text == f"wrote {out / 'first'}\nwrote {out / 'second'}\n"
    for job in ("first", "second"):
        for path in (folder / "run" / "adapters" / job).iterdir():
            assert (out / job / path.name).read_bytes() == path.read_bytes()
    said(capsys, "export", folder / "run", tmp_path / "one", "--job", "second")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["second"]


@pytest.mark.parametrize("model", [RunConfig, LoraJob, DataConfig])
def test_every_setting_is_in_the_docs(model):
    text = (DOCS / "run_file.md").read_text()
    docstrings = "".join(c.__doc__ for c in model.__mro__ if issubclass(c, StrictModel))
    for name in model.model_fields:
        assert f"`{name}`" in text, f"docs/run_file.md lacks {name}"
        assert f"{name}:" in docstrings, f"the docstring lacks {name}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "invalid choice: 'trian'. Did you mean train?"),
        (["zzz"], "(choose from 'train', "),
        (["train", "run.yaml", "--resumee"], "--resumee. Did you mean --resume?"),
        (["train"], "are required: run_file. For example: jaxlora train run.yaml"),
        (["stop"], "are required: run_dir, job. For example: jaxlora stop runs/first"),
        (["clone", "run"], "are required: job. For example: jaxlora clone"),
    ],
)
def test_a_mistake_in_the_arguments_says_what_was_meant(capsys, arguments, says):
    with pytest.raises(SystemExit):
        main(arguments)
    assert says in capsys.readouterr().err
