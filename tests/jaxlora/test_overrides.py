"""Settings of the command line in the place of those of a run file."""

import logging

import pytest

from jaxlora.config.run_file import RunFile
from jaxlora.errors import ConfigError

RUN = """\
model: m
defaults:
  learning_rate: 2e-4
  eval_fraction: 0.1
  data: &shared {path: a.jsonl, limit: 4}
jobs:
  - {name: orders, lora_r: 8, learning_rate: 1e-3}
  - {name: v1.5, data: *shared}
  - {name: v1, data: *shared, rank_pattern: {q_proj: 4}}
sweep:
  parameters: {seed: [0]}
  early_exit: [{type: halving, eta: 3}]
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def jobs(path, *texts) -> dict:
    file = RunFile.read(path, texts)
    return {job.name: job for job in file.config({}).jobs}


def test_a_key_is_found_in_each_place(path):
    """A job changes its own copy of a default, and of what YAML's aliases share."""
    found = jobs(
        path,
        "defaults.learning_rate=1e-4",
        "jobs.orders.rank=32",
        "jobs.orders.data.limit=1",
        "jobs.v1.5.data.path=b.csv",
        "jobs.v1.rank_pattern.layers.0.*=2",
        "jobs.v1.data.prompt='{{ a }} = {{ b }}'",
    )
    assert [job.learning_rate for job in found.values()] == [1e-3, 1e-4, 1e-4]
    assert [job.rank for job in found.values()] == [32, 16, 16]
    assert [job.data.limit for job in found.values()] == [1, 4, 4]
    assert [job.data.path for job in found.values()] == ["a.jsonl", "b.csv", "a.jsonl"]
    assert found["v1"].rank_pattern == {"q_proj": 4, "layers.0.*": 2}
    assert found["v1"].data.prompt == "{{ a }} = {{ b }}"


def test_settings_of_the_run_and_of_its_sweep(path):
    texts = "packer=greedy", "sweep.early_exit.0.eta=2", "sweep.parameters.seed=[0, 1]"
    config = RunFile.read(path, texts).config({})
    assert config.packer == "greedy" and config.sweep is not None
    assert config.sweep.early_exit[0].eta == 2
    assert len(config.jobs) == 6


def test_what_is_overridden_is_said(path, caplog):
    with caplog.at_level(logging.INFO, logger="jaxlora"):
        RunFile.read(path, ["defaults.lr_schedule=linear", "defaults.rank=4"])
        RunFile.read(path)
    (line,) = caplog.messages
    assert line == (
        f"{path}: overridden: defaults.lr_schedule=linear; defaults.rank=4 (job orders "
        "has its own)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=3", "rank=3: 'rank' is a setting of a job. Write defaults.rank=... for"),
        ("packr=joint", "packr=joint: unknown key 'packr'. Did you mean 'packer'?"),
        ("packer", "'packer': give settings as KEY=VALUE, such as defaults."),
        ("packer=fast", "packer=fast: must be 'joint'"),
        ("jobs.oders.rank=3", "there is no job 'oders'. Did you mean 'orders'?"),
        ("jobs.zzz.rank=3", "there is no job 'zzz'. There are: orders, v1.5, v1."),
        ("jobs.v1=3", "jobs.v1=3: name a setting of the job, as in jobs.v1.rank=32."),
        ("jobs.v1.rnk=3", "jobs.v1.rnk=3: unknown key 'rnk'. Did you mean 'rank'?"),
        ("jobs.v1.rank.x=3", "'rank' has no settings within it. Write rank=..."),
        ("jobs.v1.rank=0", "jobs.v1.rank=0: must be greater than 0 (given: 0)"),
        ("jobs.v1.data={path: 1}", "jobs.v1.data={path: 1}: path: expected text"),
        ("jobs.v1.data.lim=3", "unknown key 'lim'. Did you mean 'limit'?"),
        ("defaults.packing=true", "'packing' is not a setting here. Leave it out"),
        ("defaults.rank=[1", "defaults.rank, line 1, column 3: cannot be read as YAML"),
        ("sweep.early_exit.7.eta=2", "'early_exit' is a list of 1, whose items are"),
        ("mesh=stage=2", "mesh=stage=2: --mesh is given as well. Keep one."),
    ],
)
def test_mistakes_name_the_argument(path, text, message):
    given = {"mesh": "fsdp=1"}
    with pytest.raises(ConfigError) as caught:
        RunFile.read(path, [text], mesh="--mesh").config(given)
    assert message in str(caught.value)


def test_a_setting_is_given_once(path):
    with pytest.raises(ConfigError, match="lora_r is given twice"):
        RunFile.read(path, ["jobs.orders.rank=1", "jobs.orders.lora_r=2"])
