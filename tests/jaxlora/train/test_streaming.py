"""Jobs whose data are streamed: as ordinary ones, and the same bits after a kill."""

import pathlib

import pytest

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.errors import ConfigError
from jaxlora.forecast import plan_run
from tests import tiny
from tests.jaxlora.train.at_window import InterruptAt
from tests.jaxlora.train.conftest import TWO_SLOTS
from tests.jaxlora.train.outcome import Outcome, outcome
from tests.jaxlora.train.test_contracts import assert_same_training

# That of `train` with three slots.
SHAPE = TWO_SLOTS | {"max_concurrent_jobs": 3}
JOB = {"rank": 4, "batch_size": 3, "learning_rate": 1e-2, "max_length": 96}
JOB |= {"target_modules": ["q_proj"], "dropout": 0.1, "steps": 12}


def write_shards(folder: pathlib.Path, sizes=(11, 6, 8)) -> str:
    folder.mkdir()
    for i, size in enumerate(sizes):
        tiny.write_records(folder / f"part-{i}.jsonl", size, seed=i)
    return str(folder)


def streamed(path: str, **changes) -> dict:
    data = {"path": path, "streaming": True, "bad_records": "drop"}
    return data | {"shuffle_buffer": 9} | changes


@pytest.fixture
def ordinary(tmp_path) -> LoraJob:
    path = tiny.write_records(tmp_path / "ordinary.jsonl", 20, seed=7)
    return LoraJob(name="ordinary", data={"path": path}, **JOB | {"batch_size": 4})


def test_one_window_trains_as_an_ordinary_data_set(train, tmp_path, ordinary):
    """To the bit, beside an ordinary job, over several passes."""
    path = write_shards(tmp_path / "set", sizes=(11,))
    both = []
    for data in (streamed(path, shuffle_buffer=100), {"path": f"{path}/part-0.jsonl"}):
        both.append(train([LoraJob(name="s", data=data, **JOB), ordinary]))
    ours, wanted = both
    assert ours.losses == wanted.losses and ours.bytes == wanted.bytes
    assert len(ours.losses["s"]) == 12


def test_alone_equals_together(train, tmp_path, ordinary):
    """Streams of two seeds, with held-out first records, beside an ordinary job.

    In the programs of the test above: the second stream follows the ordinary job.
    """
    path = write_shards(tmp_path / "set")
    first = {"path": path, "streaming": True, "limit": 4}
    job = JOB | {"data": streamed(path, skip=4), "eval_data": first, "eval_every": 5}
    jobs = [LoraJob(name=f"s{seed}", seed=seed, **job) for seed in (0, 1)]
    together = train([jobs[0], ordinary, jobs[1]], max_concurrent_jobs=2)
    assert together.losses["s0"] != together.losses["s1"]
    for each in jobs:
        assert_same_training(together, train([each]), [each.name])


@pytest.mark.parametrize("number", [pytest.param(3, marks=pytest.mark.grid), 7])
def test_a_resumed_run_ends_in_the_same_bits(model, tmp_path, ordinary, number):
    """Interrupted in other windows; a copy of the job goes on with it in the data.

    Once with a mixture of two streams.
    """
    data = streamed(write_shards(tmp_path / "set"))
    if number == 7:
        other = streamed(write_shards(tmp_path / "other", sizes=(5,)))
        shares = {"mix": "interleave", "probabilities": [0.7, 0.3]}
        data = {"datasets": [data, other], **shares}
    job = LoraJob(name="s", data=data, **JOB)
    copy = job.replace(name="copy", clone_of={"job": "s", "step": 4}, steps=9)

    def config(name: str) -> RunConfig:
        return RunConfig(
            model=str(model.folder),
            output_dir=str(tmp_path / name),
            jobs=[job, copy, ordinary],
            window_steps=1,
            **SHAPE,
        )

    whole = outcome(config("whole"), model)
    stopped = config("stopped")
    Trainer(stopped, model).train(callbacks=[InterruptAt(number)])
    trainer = Trainer(stopped, model)
    resumed = Outcome(trainer, trainer.train(resume=True), model)
    assert resumed.bytes == whole.bytes and len(resumed.bytes) == 3
    assert resumed.losses == whole.losses
    stream = next(j for j in trainer.jobs if j.name == "s").prepared.stream
    steps = [place.step for place in stream._places]
    assert 0 in steps and max(steps) >= 11
    # No window between the first one and the one that was saved was read again.
    assert not [step for step in steps if 3 < step < number - 4]


def test_a_changed_shard_is_named(model, tmp_path):
    path = write_shards(tmp_path / "set")
    job = LoraJob(name="s", data=streamed(path), **JOB)
    config = RunConfig(
        model=str(model.folder), output_dir=str(tmp_path / "run"), jobs=[job], **SHAPE
    )
    Trainer(config, model).train(callbacks=[InterruptAt(1)])
    tiny.write_records(tmp_path / "set" / "part-2.jsonl", 8, seed=9)
    with pytest.raises(ValueError, match="changed since the checkpoint: shard part-2"):
        Trainer(config, model).train(resume=True)


def test_a_plan_takes_the_first_window_for_all(model, tmp_path, ordinary):
    """It reads no other windows, however many steps there are."""
    path = write_shards(tmp_path / "set")
    job = LoraJob(name="s", data=streamed(path), **JOB | {"steps": 100})
    config = RunConfig(
        model=str(model.folder),
        output_dir=str(tmp_path / "run"),
        jobs=[job, ordinary],
        **SHAPE,
    )
    forecast = plan_run(config)
    mine = [s for s in forecast.samples if s.owner == 0]
    assert len(mine) == 300 and len({s.num_tokens for s in mine}) <= 9
    config = config.replace(microbatch_tokens=64)
    with pytest.raises(ConfigError, match="a sample of 96 tokens, and this run supp"):
        plan_run(config)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"steps": None}, "length of an epoch is not known .* set steps"),
        ({"eval_fraction": 0.1}, "Give eval_data: .*; or the first records, by limit"),
        ({"too_long": "error"}, "Set truncate or drop"),
        ({"data.bad_records": "error"}, "Set bad_records=.drop. in data"),
        ({"data.streaming": False}, "skip needs streaming=True"),
        ({"data.limit": 3}, "Leave shuffle_buffer out, or limit"),
        ({"eval_data": {"path": "x", "streaming": True}}, "set limit, the number of f"),
        (
            {"data": {"datasets": [{"path": "x", "streaming": True}, "y"]}},
            "some data sets are streamed, and others have an end",
        ),
    ],
)
def test_settings_that_a_stream_cannot_have(changes, match):
    data = streamed("set", skip=1)
    job = JOB | {"name": "s", "data": data}
    for key, value in changes.items():
        head, _, inner = key.partition(".")
        job[head] = data | {inner: value} if inner else value
    with pytest.raises(ConfigError, match=match):
        LoraJob(**job)


def test_a_paused_stream_goes_on(train, tmp_path, ordinary):
    """It lets its windows go in between, and reads the one where it is again."""
    job = LoraJob(name="s", data=streamed(write_shards(tmp_path / "set")), **JOB)
    held = []

    def pause(trainer):
        state = next(j for j in trainer.jobs if j.name == "s")
        held.append((state.progress.step, len(state.prepared.stream._held)))
        if len(held) == 3:
            trainer.pause_job("s")
        if len(held) == 6:
            trainer.resume_job("s")

    wanted = train([job, ordinary], max_concurrent_jobs=2, window_steps=1)
    found = train(
        [job, ordinary], max_concurrent_jobs=2, window_steps=1, on_window=pause
    )
    assert_same_training(found, wanted, ["s", "ordinary"])
    paused = [num for step, num in held[4:6]]
    assert paused == [0, 0] and held[5][0] < 12
