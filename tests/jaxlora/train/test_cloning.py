"""The settings of a copy: what may change, and what may not."""

import pytest

from jaxlora import LoraJob, RunConfig
from jaxlora.cli.main import main
from jaxlora.config.clone import CHANGEABLE, CloneOf
from jaxlora.errors import ConfigError
from jaxlora.run.clone_settings import clone_settings
from jaxlora.run.identity import FIXED_IN_JOB

PARENT = LoraJob(name="a", data={"path": "a.jsonl"}, eval_fraction=0.2, rank=4)


def test_a_copy_may_change_what_follows_from_no_saved_tensor():
    assert CHANGEABLE & FIXED_IN_JOB.keys() == {"dropout"}
    assert "clone_of" in FIXED_IN_JOB


def test_a_copy():
    copy = clone_settings(
        PARENT, {"lr_scheduler_type": "linear", "learning_rate": 3e-4}
    )
    assert (copy.name, copy.lr_schedule) == ("a-linear-lr3e-4", "linear")
    assert (copy.learning_rate, copy.rank) == (3e-4, 4)
    assert copy.clone_of == CloneOf(job="a")
    again = clone_settings(copy, {"dropout": 0.1}, name="b")
    assert (again.name, again.clone_of) == ("b", CloneOf(job="a-linear-lr3e-4"))
    assert again.learning_rate == 3e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 8}, "rank: cannot change in a copy: the saved weights"),
        ({"seed": 8}, "seed: cannot change in a copy: the position in the data"),
        ({"max_length": 8}, "max_length: cannot change in a copy: a copy goes on"),
        ({"lerning_rate": 1}, "Did you mean 'learning_rate'"),
        ({"learning_rate": "x"}, "learning_rate: expected a number"),
        ({"rank": 8, "seed": 3}, "seed: cannot change"),
        ({}, "would train the same"),
    ],
)
def test_what_may_not_change(changes, words):
    with pytest.raises(ConfigError) as found:
        clone_settings(PARENT, changes)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clone_of": {"job": "b", "step": 3}}, "which is no other job"),
        ({"clone_of": {"job": "copy", "step": 3}}, "which is no other job"),
        ({"clone_of": {"job": "a"}}, "give clone_of a step"),
        ({"rank": 8, "seed": 2}, "and rank, seed cannot differ"),
        ({"continue_from": "x"}, "give clone_of or continue_from"),
    ],
)
def test_copies_in_a_run_file(changes, words):
    copy = {"name": "copy", "clone_of": {"job": "a", "step": 3}, "learning_rate": 1e-3}
    given = {"data": PARENT.data, "eval_fraction": 0.2, "rank": 4}
    RunConfig(model="m", jobs=[PARENT, given | copy])
    with pytest.raises(ConfigError) as found:
        RunConfig(model="m", jobs=[PARENT, given | copy | changes])
    assert words in str(found.value)


def test_the_command_reads_settings(tmp_path, capsys):
    for given, words in (
        (["learning_rate"], "give each setting once, such as learning_rate=3e-4"),
        (["steps=1", "steps=2"], "give each setting once"),
        (["steps=1"], "takes no requests"),
    ):
        assert main(["clone", str(tmp_path), "a", *given]) == 1
        assert words in capsys.readouterr().err
