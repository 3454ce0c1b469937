"""All problems of a run are reported at once, in words that fit YAML and Python."""

import difflib
import pathlib

import pytest
import yaml

from jaxlora import DataConfig, LoraJob, RunConfig, Trainer
from jaxlora.cli.main import main
from jaxlora.config.run_file import load_run, run_config
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.problems import Source, problem_of
from tests import tiny

RUN_FILE = """\
base_model: nowhere/at/all
defaults:
  rank: 0
  eval_every: 5
jobs:
  - name: a
    data: {path: gone.jsonl, chatt: true}
    lora_dropout: 1.5
  - name: A
    data:
      path: gone.parquet
    keep_best: maybe
    init_from: no_folder
packer: fast
pipeline_microbatches: 1
mesh: stage=2
"""
LINES = [
    "line 1: base_model: nowhere/at/all: there is no such folder.",
    "line 3: defaults.rank: must be greater than 0 (given: 0)",
    "line 4: defaults.eval_every: eval_every needs held-out records",
    "line 7: jobs.0.data.chatt: unknown key 'chatt'. Did you mean 'chat'?",
    "line 7: jobs.0.data.path: gone.jsonl: no such file",
    "line 8: jobs.0.lora_dropout: must be less than 1 (given: 1.5)",
    "line 11: jobs.1.data.path: gone.parquet: no such file",
    "line 12: jobs.1.keep_best: expected true or false (given: 'maybe')",
    "line 13: jobs.1.init_from: init_from='no_folder': there is no PEFT folder",
    "line 14: packer: must be 'joint'",
    "line 15: pipeline_microbatches: pipeline_microbatches=1 is less than the 2",
]


@pytest.fixture
def here(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_file_with_many_problems(here, capsys, command):
    (here / "run.yaml").write_text(RUN_FILE)
    assert main([command, "run.yaml"]) == 1
    lines = capsys.readouterr().err.removeprefix("jaxlora: error: ").splitlines()
    assert len(lines) == len(LINES)
    for line in LINES:
        assert any(found.startswith(f"run.yaml, {line}") for found in lines), line


def test_an_option_is_named_as_such(here, capsys):
    (here / "run.yaml").write_text(RUN_FILE)
    assert main(["train", "run.yaml", "--mesh", "heads=2"]) == 1
    assert "\n--mesh: " in capsys.readouterr().err


def test_valid_settings_and_wrong_inputs(here, capsys):
    """The model and its tokenizer are here, so targets are checked as well."""
    model = tiny.write_model(here / "model")
    data = tiny.write_records(here / "data.jsonl", 6, seed=0)
    wrong = {"path": str(data), "prompt": "{{ a", "kind": "x"}
    jobs = [
        {"name": "a", "data": {"path": "gone.jsonl"}, "target_modules": ["query"]},
        {"name": "b", "data": wrong, "rank": 4000},
    ]
    run = {"model": str(model), "output_dir": "out", "jobs": jobs}
    with pytest.raises(JaxloraError) as caught:
        Trainer(RunConfig(**run))
    starts = [
        "jobs.0.data.path: gone.jsonl: no such file",
        "jobs.1.data.prompt: the template '{{ a' does not parse",
        "jobs.1.data.kind: data.kind is 'x', and there are auto, prompt_completion",
        "jobs.0.target_modules: job 'a': target_modules entry 'query' matches no",
        "jobs.1.target_modules: job 'b' has rank 4000",
    ]
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    for start in starts:
        assert any(line.startswith(f"RunConfig: {start}") for line in lines), lines
    text = (
        f"model: {model}\noutput_dir: out\njobs:\n- name: a\n  data: {{path: x.json}}"
    )
    (here / "run.yaml").write_text(text)
    assert main(["plan", "run.yaml"]) == 1
    expected = "jaxlora: error: run.yaml, line 5: jobs.0.data.path: x.json: no such"
    assert f"\n{capsys.readouterr().err}".count(f"\n{expected}") == 1


def test_errors_in_python():
    with pytest.raises(ConfigError) as caught:
        LoraJob(name="a/b", data=3, rank=None, shuffle="no", load_in_4bit=True, rnak=1)
    assert str(caught.value).splitlines() == [
        "LoraJob: load_in_4bit: 'load_in_4bit' is not a setting here. Set "
        "`quantize_base: nf4` for the run. (given: true)",
        "LoraJob: rnak: unknown key 'rnak'. Did you mean 'rank'? (given: 1)",
        "LoraJob: name: job name 'a/b' must be a plain folder name: letters, digits, "
        "'.', '_' and '-', at most 100, not starting with '.', '_' or '-'. "
        "(given: 'a/b')",
        "LoraJob: data: expected a mapping, such as {path: ...} (given: 3)",
        "LoraJob: rank: expected a whole number, such as 8 (given: nothing)",
        "LoraJob: shuffle: expected true or false (given: 'no')",
    ]
    job = {"name": "a", "data": {"path": "a.jsonl", "limit": 0}}
    with pytest.raises(ConfigError, match=r"RunConfig: jobs\.0\.data\.limit: must be"):
        RunConfig(model="m", jobs=[job])
    with pytest.raises(ConfigError, match="DataConfig: path: give path: a file"):
        DataConfig()


def test_rules_do_not_judge_settings_that_are_wrong():
    """An evaluation may be meant by a setting that cannot be read."""
    for wrong in ({"eval_fraction": 2.0}, {"eval_fracton": 0.1}, {"eval_data": "x"}):
        with pytest.raises(ConfigError) as caught:
            LoraJob(name="a", data={"path": "a"}, eval_every=3, **wrong)
        assert len(str(caught.value).splitlines()) == 1


def test_a_misspelt_setting_is_not_also_missing():
    with pytest.raises(ConfigError) as caught:
        RunConfig(modle="m", jobs=[LoraJob(name="a", data=DataConfig(path="a"))])
    assert len(caught.value.problems) == 1


def test_lines_of_merged_and_nested_keys(here):
    text = """\
model: m
jobs:
  - &a
    name: a
    data: {path: a.jsonl}
    rank: 0
  - <<: *a
    name: b
"""
    (here / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run("run.yaml")
    assert str(caught.value).splitlines() == [
        "run.yaml, line 6: jobs.0.rank: must be greater than 0 (given: 0)",
        "run.yaml, line 6: jobs.1.rank: must be greater than 0 (given: 0)",
    ]


def test_a_model_that_is_missing_names_those_that_are_here(here, monkeypatch):
    from huggingface_hub import constants

    from jaxlora.errors import ModelError
    from jaxlora.hf.files import model_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"No other model was found on this machine"):
        model_folder("owner/name")
    tiny.write_model(here / "models" / "converted")
    tiny.write_model(here / "hub" / "models--own--tiny" / "snapshots" / "abc")
    for missing in ("owner/name", "./models/convertd"):
        with pytest.raises(ModelError) as caught:
            model_folder(missing)
        message = str(caught.value)
        assert message.endswith("this machine: models/converted, own/tiny.")


def test_many_problems_are_counted_and_the_file_is_parsed_once(here, monkeypatch):
    jobs = "".join(
        f"  - {{name: j{i}, data: {{path: a}}, rank: 0}}\n" for i in range(300)
    )
    (here / "run.yaml").write_text(f"model: m\njobs:\n{jobs}")
    parsed = []
    compose = yaml.compose
    count = lambda *a, **k: parsed.append(a) or compose(*a, **k)
    monkeypatch.setattr(yaml, "compose", count)
    looked = []
    named = difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda *a, **k: looked.append(a) or named(*a, **k)
    )
    with pytest.raises(ConfigError) as caught:
        load_run("run.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 51 and lines[-1] == "and 250 more"
    assert (
        lines[49]
        == "run.yaml, line 52: jobs.49.rank: must be greater than 0 (given: 0)"
    )
    assert len(caught.value.problems) == 300
    assert len(parsed) == 2 and not looked


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"objective_args": {"beta": [1]}},
            "objective_args.beta: expected a number, such as 8 or 2e-4; or expected "
            "one text, not a list",
        ),
        (
            {"trainable_token_indices": {"lm_head": [1, "x"]}},
            "trainable_token_indices.lm_head.1: expected a number, without quotes, "
            "such as 8 or 2e-4 (given: 'x')",
        ),
        (
            {"optimizer_args": {"float": -1.0}},
            "optimizer_args.float: expected true or false; or must be greater than or "
            "equal to 0 (given: -1.0)",
        ),
        (
            {"target_modules": 3},
            "target_modules: expected text, in quotes if need be; or expected a list, "
            "such as [a, b] (given: 3)",
        ),
    ],
)
def test_paths_have_no_names_of_types(settings, line):
    """A setting that has several forms has one problem, in its own place."""
    job = {"name": "a", "data": {"path": "a"}} | settings
    with pytest.raises(ConfigError) as caught:
        run_config({"model": "m", "jobs": [job]})
    assert str(caught.value) == f"run: jobs.0.{line}"


def test_one_line_says_each_form_of_a_setting():
    jobs = [{"name": "a", "data": {"path": "a"}}]
    wrong = {"model": "m", "jobs": jobs, "layers_per_program": -1}
    with pytest.raises(
        ConfigError, match=r"run: layers_per_program: .*; or must be 'a"
    ) as caught:
        run_config(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "text", "line"),
    [
        (
            ("jobs", 0, "objective"),
            "objective_args: beta is 0",
            "jobs.0.objective_args",
        ),
        (("report_to",), "report_to: beta is 0", "report_to"),
        (("sweep",), "sweep.metric: beta is 0", "sweep.metric"),
        (("sweep", "metric", "name"), "sweep.metric: beta is 0", "sweep.metric.name"),
        (("model",), "mesh: beta is 0", "mesh"),
        (("model",), "model: beta is 0", "model"),
        (("model",), "tokenizer.json: beta is 0", "model: tokenizer.json"),
        (("jobs", 0), "a.jsonl: beta is 0", "jobs.0: a.jsonl"),
    ],
)
def test_an_error_names_its_setting_once(path, text, line):
    problem = problem_of(path, ConfigError(text), RunConfig.model_fields)
    assert Source("f").describe(problem) == f"f: {line}: beta is 0"
