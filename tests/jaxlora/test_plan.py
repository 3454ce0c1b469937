"""A plan says what a run then does."""

import pytest

from jaxlora import LoraJob, RunConfig, Trainer
from jaxlora.plan import plan_run
from jaxlora.train.run_log import read_events
from scheduler import violations
from tests import tiny


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


def test_the_trainer_runs_what_was_planned(config):
    planned = plan_run(config)
    trainer = Trainer(config)
    trainer.train()
    events = read_events(trainer.output_dir / "metrics.jsonl")
    windows = [e for e in events if e["event"] == "window"]
    ran = [(e["num_microbatches"], e["num_tokens"], e["fill"]) for e in windows]
    assert ran == [
        (
            len(part.schedule.microbatches),
            sum(s.num_tokens for s in part.samples),
            round(part.schedule.fill, 4),
        )
        for part in planned.parts
    ]
    assert [e["planned_ahead"] for e in windows] == [False] + [True] * (len(ran) - 1)
    first = {s.job for s in planned.parts[0].samples}
    assert first == {0, 1, 4}  # by priority, then first come first served


@pytest.mark.parametrize("stages", [1, 3])
def test_a_plan_is_whole(config, stages):
    planned = plan_run(config, stages=stages)
    samples = [s for part in planned.parts for s in part.samples]
    steps = {(s.job, s.batch) for s in samples}
    assert len(steps) == sum(job.num_steps for job in planned.jobs)
    for whole in (planned.whole, planned.greedy):
        assert not violations(whole.schedule, samples, distance=stages)
        assert whole.simulation.stale == 0
        assert whole.gap >= 0
    assert planned.whole.simulation.makespan <= planned.greedy.simulation.makespan
    assert 0 < planned.busy <= 1
    if stages == 1:
        assert planned.busy == pytest.approx(planned.whole.schedule.fill)
    else:
        assert len(planned.parts) < len(plan_run(config).parts)


def test_first_steps_only(config):
    planned = plan_run(config, steps=2)
    assert {job.num_steps for job in planned.jobs} == {2}
    assert {s.batch for part in planned.parts for s in part.samples} == {0, 1}


@pytest.mark.parametrize("packer", ["greedy", "lorafusion"])
def test_plans_with_any_packer(config, packer):
    planned = plan_run(config.model_copy(update={"packer": packer}), steps=3)
    assert planned.whole.gap >= 0
    if packer == "greedy":
        assert planned.whole.schedule == planned.greedy.schedule


def test_plans_do_not_change(config):
    one, two = (plan_run(config, steps=4) for _ in range(2))
    assert one.whole.schedule == two.whole.schedule
    assert [p.schedule for p in one.parts] == [p.schedule for p in two.parts]
