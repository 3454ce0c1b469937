"""A plan says what a run then does."""

import json
import re

import pytest

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.errors import ConfigError
from jaxlora.forecast import plan_run
from jaxlora.scheduler import violations
from jaxlora.train.execute.feed import Feed
from tests import tiny

pytestmark = pytest.mark.usefixtures("memory_by_formula")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    """Five jobs through three slots; one of them comes first."""
    folder = tmp_path_factory.mktemp("plan")
    jobs = [
        LoraJob(
            name=f"job{i}",
            data={"path": tiny.write_records(folder / f"{i}.jsonl", 12 + i, seed=i)},
            batch_size=2 + i % 3,
            steps=3 + 2 * i,
            rank=2,
            target_modules=["q_proj"],
            max_length=96,
            priority=int(i == 4),
        )
        for i in range(5)
    ]
    return RunConfig(
        model=str(tiny.write_model(folder / "model")),
        output_dir=str(folder / "run"),
        jobs=jobs,
        max_concurrent_jobs=3,
        microbatch_tokens=256,
        block_tokens=16,
        dtype="float32",
        checkpoint_every=None,
    )


def test_a_plan_warns_of_samples_beyond_the_models_positions(config, tmp_path, caplog):
    folder = tiny.write_model(
        tmp_path / "model", config={**tiny.CONFIG, "max_position_embeddings": 40}
    )
    changes = {"model": str(folder), "jobs": config.jobs[:2], "max_concurrent_jobs": 2}
    plan_run(config.model_copy(update=changes))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 2
    for name, warning in zip(("job0", "job1"), warnings, strict=True):
        assert warning.startswith(f"{name}: ")
        assert "longer than the 40 positions that the model supports" in warning


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"steps": None, "epochs": 1e300},
            r"job 'job0' are .* at most 1,000,000,000",
        ),
        ({"steps": 10**9}, "samples, and a plan has at most 2,000,000.*--steps 1000"),
    ],
)
def test_jobs_that_are_too_long_are_refused(config, changes, words):
    jobs = [config.jobs[0].replace(**changes)]
    with pytest.raises(ConfigError, match=words):
        plan_run(config.replace(jobs=jobs))


def test_a_plan_warns_of_held_out_records_that_are_trained_on(config, caplog, tmp_path):
    lines = [json.dumps({"prompt": f"{i} ", "completion": "x"}) for i in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "held.jsonl").write_text("\n".join([*lines[5:8], '{"text": "new"}']))
    held = {"path": str(tmp_path / "held.jsonl"), "bad_records": "drop"}
    job = config.jobs[0].replace(data={"path": str(tmp_path / "train.jsonl")})
    jobs = [
        job.replace(name="given", eval_data=held),
        job.replace(name="share", eval_fraction=0.2),
        job.replace(name="twice", data=held, eval_data=held),
    ]
    plan_run(config.replace(jobs=jobs))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    wanted = "3 of 3 held-out records are also in the training data. On these, the"
    assert [w.partition(": ")[0] for w in warnings if wanted in w] == ["given, twice"]


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("fsdp=1", marks=pytest.mark.grid),
        pytest.param("stage=2", marks=pytest.mark.needs_devices(2)),
        pytest.param("fsdp=2", marks=[pytest.mark.needs_devices(2), pytest.mark.grid]),
    ],
)
def test_the_trainer_runs_what_was_planned(config, mesh, monkeypatch, tmp_path):
    """Jobs come and go through three slots; the microbatches are those foretold."""
    config = config.replace(mesh=mesh, output_dir=str(tmp_path / "run"))
    planned, ran, take = plan_run(config), [], Feed.take
    trainer = Trainer(config)

    def note(self):
        (tick, _), fed = self._fetched[0], take(self)
        names = {slot: job.name for slot, job in self._jobs.items()}
        ran.extend(
            tuple((names[s.owner], s.batch, s.index) for s in microbatch)
            for microbatch in tick
            if any(tick) or planned.sizes.stage > 1
        )
        return fed

    monkeypatch.setattr(Feed, "take", note)
    trainer.train()
    while not ran[-1]:  # until the last step is reported
        ran.pop()
    names = [job.name for job in planned.jobs]
    assert ran == [
        tuple((names[s.owner], s.batch, s.index) for s in microbatch)
        for microbatch in planned.whole.schedule.microbatches
    ]
    first = {s.owner for s in planned.whole.schedule.microbatches[0]}
    assert first <= {0, 1, 4}  # by priority, then first come first served


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp=1",
        pytest.param("stage=2", marks=pytest.mark.needs_devices(2)),
        pytest.param("data=2,stage=2,fsdp=2", marks=pytest.mark.needs_devices(8)),
    ],
)
def test_a_plan_is_whole(config, mesh):
    planned = plan_run(config.replace(mesh=mesh, max_concurrent_jobs=4))
    sizes = planned.sizes
    samples = [s for s in planned.samples]
    steps = {(s.owner, s.batch) for s in samples}
    assert len(steps) == sum(job.num_steps for job in planned.jobs)
    rules = dict(distance=sizes.stage, num_lanes=sizes.num_lanes)
    whole = planned.whole
    assert not violations(whole.schedule, samples, **rules)
    assert whole.gap >= 0


@pytest.mark.needs_devices(2)
def test_a_stage_takes_its_share_of_the_time(config):
    """Both stages of one layer each; the head makes the second one slower."""
    planned = plan_run(config.replace(mesh="stage=2"), steps=1)
    first, second = planned.whole.simulation.utilization
    assert first < second < 1


@pytest.mark.usefixtures("compiled_when_called")
@pytest.mark.needs_devices(2)
def test_a_mesh_is_chosen_for_this_machine(config, caplog):
    caplog.set_level("INFO")
    auto = config.replace(mesh="auto")
    planned = plan_run(auto)
    assert Trainer(auto).config.mesh == str(planned.sizes)
    assert 1 < planned.sizes.num_devices <= 8
    assert any(f"mesh auto: {planned.sizes} on" in m for m in caplog.messages)


@pytest.mark.needs_devices(2)
def test_devices_in_flight_share_the_steps_of_jobs(config, tmp_path):
    """More lanes and stages get smaller microbatches, down to the longest sample."""
    auto = config.replace(microbatch_tokens="auto", output_dir=str(tmp_path / "run"))

    def sizes(mesh: str) -> tuple[int, int]:
        """The largest microbatches that are of use, and those that are chosen."""
        planned = plan_run(auto.replace(mesh=mesh), steps=1)
        text = "\n".join(note.text for note in planned.plan.notes)
        (most,) = re.findall(r"at most (\d+), which hold a step of every job", text)
        return int(most), planned.whole.schedule.limits.capacity

    most, chosen = sizes("fsdp=1")
    for mesh in ("stage=2", "data=2"):
        of_two, smaller = sizes(mesh)
        assert of_two == pytest.approx(most / 2, rel=0.1)
        assert 96 <= smaller < chosen


@pytest.fixture(params=["eval_data", "eval_fraction"])
def held_out_longest(config, request, tmp_path) -> RunConfig:
    """A job whose longest sample, of 151 tokens, is held out."""
    lines = [{"prompt": "a" * 10, "completion": "b" * 10}] * 3
    longest = {"prompt": "a" * 75, "completion": "b" * 75}
    path, other = tmp_path / "records.jsonl", tmp_path / "held_out.jsonl"
    if request.param == "eval_data":
        held_out = {"eval_data": {"path": str(other)}}
    else:  # seed 0 holds out the third record of four
        held_out = {"eval_fraction": 0.25, "seed": 0}
        lines.insert(2, longest)
    path.write_text("\n".join(map(json.dumps, lines)))
    other.write_text(json.dumps(longest))
    job = LoraJob(
        name="job", data={"path": str(path)}, batch_size=2, steps=1, rank=2, **held_out
    )
    output_dir = str(tmp_path / "run")
    return config.model_copy(update={"jobs": [job], "output_dir": output_dir})


@pytest.mark.usefixtures("compiled_when_called")
def test_held_out_samples_count(held_out_longest):
    """A microbatch must hold them, whether its size is chosen or given."""
    auto = held_out_longest.model_copy(update={"microbatch_tokens": "auto"})
    planned, trainer = plan_run(auto), Trainer(auto)
    [run] = trainer.jobs
    assert run.prepared.eval_data is not None
    assert max(len(s.token_ids) for s in run.prepared.train_data.samples) < 32
    assert max(len(s.token_ids) for s in run.prepared.eval_data.samples) == 151
    assert planned.whole.schedule.limits == trainer.config.limits
    assert trainer.config.limits.capacity == 160
    given = held_out_longest.model_copy(update={"microbatch_tokens": 144})
    said = []
    for refuse in (plan_run, Trainer):
        with pytest.raises(ConfigError, match=r"a sample of 151 tokens, .* 144") as e:
            refuse(given)
        said.append(str(e.value))
    assert said[0] == said[1]


def test_first_steps_only(config):
    planned = plan_run(config, steps=2)
    assert {job.num_steps for job in planned.jobs} == {2}
    assert {s.batch for s in planned.samples} == {0, 1}


@pytest.mark.parametrize("packer", ["greedy", "lorafusion"])
def test_plans_with_any_packer(config, packer):
    planned = plan_run(config.model_copy(update={"packer": packer}), steps=3)
    assert planned.whole.gap >= 0


def test_plans_do_not_change(config):
    one, two = (plan_run(config, steps=4) for _ in range(2))
    assert one.whole.schedule == two.whole.schedule


@pytest.mark.parametrize(
    "pace, line",
    [
        ("auto", "pace: equal: running jobs get the same number of tokens"),
        ("together", "pace: together: running jobs end at the same time"),
    ],
)
def test_the_log_says_the_pace(config, pace, line, caplog):
    with caplog.at_level("INFO", logger="jaxlora"):
        plan_run(config.model_copy(update={"pace": pace}), steps=2)
    assert line in caplog.messages
