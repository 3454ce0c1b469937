"""Each setting may or may not change when a run is resumed."""

import dataclasses

import pytest

from jaxlora import LoraJob
from jaxlora.config.clone import CHANGEABLE
from jaxlora.run.identity import FIXED_IN_JOB, RunIdentity
from jaxlora.run.saved_run import RunRecord
from tests.jaxlora.train import made_run

# Settings of a job that may change: they take effect from the next optimizer step on.
# An adapter states one dropout, which a copy takes for all of its steps.
FREE_IN_JOB = CHANGEABLE - {"dropout"} | {
    "continue_from",
    # Compared by the fingerprints of the data.
    "name",
    "data",
    "eval_data",
    "eval_fraction",
    "eval_seed",
    "max_length",
    "too_long",
}
JOB = LoraJob.model_validate({"name": "a", "data": {"path": "a.jsonl"}, "steps": 4})
PRINTS = {"data_fingerprint": "d", "eval_data_fingerprint": "e"}
ADAPTER_PRINTS = "init_from_fingerprint", "reference_fingerprint"
THEN = RunIdentity(
    base="f" * 64,
    settings={"dtype": "float32"},
    jobs={
        name: JOB.model_dump(mode="json") | PRINTS | dict.fromkeys(ADAPTER_PRINTS)
        for name in ("a", "b")
    },
)


def record(identity: RunIdentity, **config: object) -> RunRecord:
    return dataclasses.replace(made_run.record(**config), identity=identity)


def changed_job(key: str) -> RunIdentity:
    jobs = THEN.jobs | {"a": THEN.jobs["a"] | {key: "another"}}
    return dataclasses.replace(THEN, jobs=jobs)


def test_every_setting_of_a_job_has_a_verdict():
    assert THEN.jobs["a"].keys() == FIXED_IN_JOB.keys() | FREE_IN_JOB
    assert not FIXED_IN_JOB.keys() & FREE_IN_JOB


@pytest.mark.parametrize("key", sorted(FIXED_IN_JOB))
def test_what_must_not_change(key):
    (why,) = changed_job(key).differences(THEN)
    then = THEN.jobs["a"][key]
    assert why == (
        f"job 'a': {key} is {then!r} in run.json and 'another' now, but must not "
        f"change, as {FIXED_IN_JOB[key]}"
    )


@pytest.mark.parametrize("key", sorted(FREE_IN_JOB))
def test_what_may_change(key):
    now = changed_job(key)
    assert not now.differences(THEN)
    (said,) = record(now).changes(record(THEN))
    assert said == f"job 'a': {key} was {THEN.jobs['a'][key]!r} and is 'another'"


def test_jobs_may_be_added_but_not_left_out():
    more = dataclasses.replace(THEN, jobs=THEN.jobs | {"c": THEN.jobs["a"]})
    assert not more.differences(THEN)
    assert record(more).changes(record(THEN)) == ["job 'c' was added"]
    (why,) = THEN.differences(more)
    assert why.startswith("job 'c' is in run.json but not in this run")


def test_jobs_in_another_order():
    other = dataclasses.replace(THEN, jobs=dict(reversed(THEN.jobs.items())))
    assert not other.differences(THEN)
    said = record(other).changes(record(THEN))
    assert said == ["the order of the jobs is now b, a"]


def test_the_base_and_its_dtype_must_stay():
    base = dataclasses.replace(THEN, base="0" * 64)
    assert base.differences(THEN)[0].startswith("the base model is another one")
    other = dataclasses.replace(THEN, settings={"dtype": "bfloat16"})
    (why,) = other.differences(THEN)
    assert why.startswith("dtype is 'float32' in run.json and 'bfloat16' now")
    before = record(THEN, window_steps=4)
    assert record(THEN, window_steps=2).changes(before) == [
        "window_steps was 4 and is 2"
    ]
