"""The plan of a sweep on groups of GPUs that are not here."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from jaxlora import LoraJob, RunConfig, Sweep
from jaxlora.costs.gpus import parse_machine
from jaxlora.errors import ConfigError
from jaxlora.forecast import plan_run, plan_run_groups
from jaxlora.forecast.forecast import foretell
from jaxlora.forecast.group_plans import group_plans
from jaxlora.forecast.sweep_groups import draw_groups, plan_groups, print_groups
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.job.prepare_run import prepare_run
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.mesh.predict import SLOT_SECONDS
from jaxlora.sweeps.engine.group_plan import GroupPlans
from jaxlora.train.saved.continue_job import continued_step
from scripts.bench.shapes import config_json
from tests import tiny

pytestmark = pytest.mark.usefixtures("memory_by_formula")

TOKENS = 512  # of each sample


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that makes a sweep of a job whose samples are equally long."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "config.json").write_text(json.dumps(config_json("llama-3.2-1b", 2)))
    tiny.write_tokenizer(folder)
    data = folder / "data.jsonl"
    text = json.dumps({"text": "a" * (TOKENS - 1)})
    data.write_text("\n".join([text] * 40))

    def make(**parameters) -> RunConfig:
        job = LoraJob(
            name="c",
            data={"path": str(data)},
            eval_fraction=0.2,
            max_length=TOKENS,
            steps=40,
        )
        return RunConfig(
            model=str(folder),
            jobs=[job],
            max_concurrent_jobs=2,
            microbatch_tokens=8 * TOKENS,
            sweep=Sweep(parameters=parameters),
        )

    return make


def planned(config: RunConfig, gpus: str):
    with planned_for(parse_machine(gpus).planned(0.75)):
        plan, jobs, _ = prepare_run(config, continued_step)
        return plan, jobs, plan_groups(plan, jobs, this_machine())


def test_groups_of_a_sweep(run, tmp_path):
    """Each configuration has a place, and together they take less time."""
    rates = [i * 1e-4 for i in range(1, 4)]
    swept = run(rank=[8, 128], learning_rate=rates, batch_size=[1])
    _, jobs, groups = planned(swept, "h100x2")
    plan, bound = groups.planned.plan, groups.planned.bound
    runs = [run for group in plan.groups for run in group.runs]
    assert sorted(r.configuration.name for r in runs) == sorted(j.name for j in jobs)
    # With the evaluations at 0, 10, 20 and 40 of 40 steps, on 8 records.
    (tokens,) = {r.configuration.step_tokens for r in runs}
    assert 0.3 < (tokens - TOKENS) / (4 * 8 * TOKENS / 40) < 0.8  # forward passes only
    assert 0 < bound.fixed_groups <= plan.makespan < groups.alone.makespan
    assert groups.meshes == {1: "fsdp=1", 2: "fsdp=2"}
    out = io.StringIO()
    print_groups(groups, Console(file=out, width=120), price_per_hour=3.0)
    text = out.getvalue()
    assert "groups of GPUs, 2 in all" in text and "lower bound" in text
    assert "price" in text and "data sheet" in text
    draw_groups(groups, tmp_path / "groups.png")
    assert (tmp_path / "groups.png").read_bytes()[:4] == b"\x89PNG"


def test_the_groups_that_auto_stands_for(run):
    """They are those of the plan, with its slots, ranks and order."""
    rates = [i * 1e-4 for i in range(1, 4)]
    config = run(rank=[8, 128], learning_rate=rates, batch_size=[1])
    _, _, groups = planned(config, "h100x2")
    auto = config.replace(
        sweep=config.sweep.replace(groups="auto"), max_concurrent_jobs=None
    )
    with planned_for(parse_machine("h100x2").planned(0.75)):
        found = group_plans(auto)
        few = group_plans(auto.replace(microbatch_tokens="auto"))
        shown = plan_run(auto)
    assert shown.groups is not None and shown.time is not None
    assert shown.time.apart > shown.time.together
    most = max(len(one.names) for one in found.groups)
    expected = groups.planned.plan.makespan + 2 * most * SLOT_SECONDS
    assert found.seconds == pytest.approx(expected)
    ranks = {job.name: job.rank for job in config.jobs}
    assert found.ranks == ranks == few.ranks
    for one, other in zip(found.groups, groups.planned.plan.groups, strict=True):
        assert (one.num_slots, one.slot_rank) == (other.num_slots, other.slot_rank)
        assert one.slot_rank == max(ranks[name] for name in one.names)
        assert one.microbatch_tokens == 8 * TOKENS
        starts = {run.configuration.name: run.start for run in other.runs}
        assert sorted(starts.values()) == [starts[name] for name in one.names]
    assert sorted(n for one in found.groups for n in one.names) == sorted(ranks)
    # A microbatch has no more tokens than a round of the group.
    (step,) = {c.step_tokens for c in groups.planned.plan.sweep.configurations}
    most = step + auto.block_tokens
    assert all(one.microbatch_tokens <= one.num_slots * most for one in few.groups)
    assert GroupPlans.of(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    with pytest.raises(ConfigError, match=r"rates .* not known.*jaxlora profile"):
        group_plans(auto)


def test_a_setting_of_smaller_meshes_leaves_larger_ones_out(run):
    config = run(rank=[8]).replace(pipeline_microbatches=1)
    assert planned(config, "h100x2")[2].meshes == {1: "fsdp=1", 2: "fsdp=2"}


def test_a_configuration_alone_takes_the_time_of_its_microbatches(run):
    """As the trainer's own prediction for one microbatch a step."""
    plan, (job,), groups = planned(run(rank=[16]), "h100")
    assert len(job.lengths(0)) * TOKENS == plan.config.microbatch_tokens
    with planned_for(parse_machine("h100").planned(0.75)):
        seconds = plan.seconds(foretell(plan, [job])[0])
    (alone,) = groups.planned.plan.sweep.configurations
    evaluated = alone.step_tokens / (len(job.lengths(0)) * TOKENS)
    makespan = groups.planned.plan.makespan
    assert makespan == pytest.approx(evaluated * seconds, rel=0.02)


def test_without_rates_nothing_is_planned(run):
    assert plan_run_groups(run(rank=[8, 16])) is None
