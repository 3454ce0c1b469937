"""Jobs that end early, pause, wait and join do so on a mesh as on one device."""

import collections

import pytest

from jaxlora.programs.program import Program
from tests.jaxlora.train.counted_run import counting
from tests.jaxlora.train.mesh_runs import assert_empty_slot, assert_same_on_meshes

pytestmark = pytest.mark.needs_devices(8)

WHOLE = "data=2,stage=2,fsdp=2"
MESHES = [pytest.param("stage=2", marks=pytest.mark.grid), WHOLE]


@pytest.fixture(scope="module")
def eventful_jobs(small_jobs):
    """Four jobs that begin, and two that join.

    The first one stops early. The second one keeps its best weights. The third one has
    the lowest priority.
    """
    changes = (
        {"early_stopping": 2, "early_stopping_delta": 100.0, "steps": 20},
        {"keep_best": True, "steps": 6},
        {"priority": -1, "steps": 9},
        {"steps": 9},
    )
    jobs = [
        job.replace(**{"eval_every": 4} | change)
        for job, change in zip(small_jobs, changes, strict=True)
    ]
    jobs[0] = jobs[0].replace(eval_every=1)
    late = jobs[1].replace(name="late", steps=4, keep_best=False)
    urgent = jobs[3].replace(name="urgent", steps=4, priority=1)
    return jobs, (late, urgent)


@pytest.fixture(scope="module")
def eventful(meshes, eventful_jobs):
    """Trains the jobs on a mesh; once on each mesh.

    Two jobs join after the first window. One takes the slot of the job that has stopped
    early, and the other one that of the job of the lowest priority, which then waits. A
    job is paused after the second window and resumed after the third.

    Returns the outcome, and the number of compiled programs after each window.
    """
    done, (jobs, joining) = {}, eventful_jobs

    def train(mesh: str):
        counts = []

        def on_window(trainer):
            counts.append(trainer.layout.num_compilations())
            if len(counts) == 2:
                for job in joining:
                    trainer.add_job(job)
            if len(counts) == 4:
                trainer.pause_job("job3")
            if len(counts) == 5:
                trainer.resume_job("job3")

        if mesh not in done:
            outcome = meshes.train(mesh, jobs, window_steps=1, on_window=on_window)
            done[mesh] = outcome, counts
        return done[mesh]

    return train


def changes_of(outcome) -> list[tuple]:
    """Returns what happens to each job between its steps, in this order."""
    events = outcome.of("job_pause", "job_resume", "job_end")
    return [(e["job"], e["event"]) for e in events]


@pytest.mark.parametrize("mesh", ["stage=2", WHOLE])
def test_an_eventful_run(eventful, mesh):
    """The adapters are the same, though jobs come and go at other times."""
    (one, _), (other, _) = eventful("fsdp=1"), eventful(mesh)
    assert_same_on_meshes(one, other)
    for slot in range(4):
        assert_empty_slot(other.trainer, slot)
    ends = {name: (p.status, p.step) for name, p in other.progress.items()}
    assert ends.pop("job0") == ("stopped early", 2)
    assert {status for status, _ in ends.values()} == {"finished"}
    left = {"job_pause", "job_resume", "job_end"}
    for name in ("job2", "job3"):
        assert {kind for job, kind in changes_of(other) if job == name} == left


@pytest.mark.parametrize("mesh", MESHES)
def test_jobs_come_and_go_without_recompiling(eventful, mesh):
    _, counts = eventful(mesh)
    assert len(counts) > 3 and len(set(counts)) == 1


@pytest.fixture
def prepared(monkeypatch):
    """The programs that are asked for in a test, by function."""
    found, prepare = collections.defaultdict(set), Program.prepare

    def note(self, *args, **options):
        program = prepare(self, *args, **options)
        found[self].add(program)
        return program

    monkeypatch.setattr(Program, "prepare", note)
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_stage_has_a_fixed_number_of_programs(
    meshes, small_jobs, eventful, mesh, prepared
):
    """Whatever has run on the mesh in this process; a new trainer compiles nothing."""
    eventful(mesh)
    prepared.clear()
    with counting() as (compiled, _):
        again = meshes.train(mesh, small_jobs)
    assert again.result.num_compilations == 0
    assert not compiled
    always = {"evaluate", "measure", "step", "empty", "read_slot"}
    kinds = {"forward", "backward"}, {"accumulate"}
    stages = again.trainer.layout.stages
    for stage, passes in zip(stages, kinds, strict=True):
        passes = passes | ({"exchange"} if stage.placement.num_lanes > 1 else set())
        programs = stage.steps.programs.items()
        counts = {name: len(prepared[one]) for name, one in programs}
        used = dict.fromkeys(always | passes, 1) | {"write_slot": 3}
        assert counts == dict.fromkeys(counts, 0) | used
