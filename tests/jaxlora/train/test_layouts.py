"""Every layout of eight devices trains what one device trains, whatever happens.

The same run on each product of the four axes and on three lists of replicas: dropout
and ragged lengths, a job that joins, one that stops early, one that is stopped, one
that diverges; and a kill, after which the run goes on in the next layout.

These are products of what other files test by itself: test_mesh_jobs.py and
test_replicas.py have jobs that come and go, test_mesh_failures.py has those that
diverge, and test_mesh_resume.py has other meshes after an interruption.
"""

import itertools
import shutil

import pytest

from jaxlora import Callback, Trainer
from jaxlora.sharding.mesh_sizes import MeshSizes
from tests.jaxlora.train.mesh_runs import assert_empty_slot, assert_same_on_meshes
from tests.jaxlora.train.runs import Copies, Outcome

pytestmark = [pytest.mark.needs_devices(8), pytest.mark.grid]


def replica(tensor: int, tokens: int, count: int = 1) -> dict[str, int]:
    return {"tensor": tensor, "microbatch_tokens": tokens, "count": count}


DEPLOYMENTS = {
    "128 + 2 x 96": (replica(1, 128), replica(1, 96, 2)),
    "128 on tensor=2 + 96 on tensor=4 + 96": (
        *(replica(2, 128), replica(4, 96), replica(1, 96)),
    ),
    "2 x 128 on tensor=2 + 4 x 96": (replica(2, 128, 2), replica(1, 96, 4)),
}
AXES = "data", "stage", "fsdp", "tensor"
PRODUCTS = [
    ",".join(f"{axis}=2" for axis in axes)
    for count in (1, 2, 3)  # all four have sixteen devices
    for axes in itertools.combinations(AXES, count)
]
LAYOUTS = [*PRODUCTS, *DEPLOYMENTS]
ONE = "fsdp=1"


@pytest.fixture(scope="module")
def eventful_jobs(mesh_jobs):
    """Four jobs that begin, of which three are cut short, and one that joins."""
    changes = (
        {"learning_rate": 1e30, "steps": 6},
        {"early_stopping": 2, "early_stopping_delta": 100.0, "eval_every": 1},
        {"steps": 30},
        {"steps": 7},
    )
    jobs = [
        job.replace(**{"keep_best": False} | change)
        for job, change in zip(mesh_jobs, changes, strict=True)
    ]
    return jobs, mesh_jobs[3].replace(name="late", steps=5)


@pytest.fixture(scope="module")
def train(meshes, eventful_jobs, tmp_path_factory):
    """Trains on a layout, and resumes there; once on each."""
    done, (jobs, late) = {}, eventful_jobs

    def config(layout: str, **settings):
        if layout in DEPLOYMENTS:
            return meshes.config(
                ONE, jobs, replicas=DEPLOYMENTS[layout], **EVENTFUL | settings
            )
        return meshes.config(layout, jobs, **EVENTFUL | settings)

    class Requests(Callback):
        """Adds a job after the first window, and stops one after some of its steps."""

        def on_window(self, event) -> None:
            if "late" not in {job.name for job in self.trainer.jobs}:
                self.trainer.add_job(late)

        def on_step(self, event) -> None:
            if (event.job, event.progress.step) == (jobs[2].name, STOPPED):
                self.trainer.stop_job(event.job)

    def run(layout: str, folder=None) -> tuple[Outcome, list]:
        settings = {} if folder is None else {"output_dir": str(folder)}
        trainer = Trainer(config(layout, **settings))
        copies = Copies(tmp_path_factory.mktemp("copies"))
        callbacks = [Requests(), copies]
        result = trainer.train(callbacks=callbacks, resume=folder is not None)
        return Outcome(trainer, result), copies.copies

    def whole(layout: str) -> tuple[Outcome, list]:
        if layout not in done:
            done[layout] = run(layout)
        return done[layout]

    return whole, lambda *args: run(*args)[0]


EVENTFUL = {"window_steps": 1, "checkpoint_every": 1}
STOPPED = 4  # steps, after which a job is stopped


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eventful_run_on_any_layout(train, tmp_path, layout):
    whole, resume = train
    (one, _), (other, copies) = whole(ONE), whole(layout)
    assert_same_on_meshes(one, other)
    ends = {name: p.status for name, p in other.progress.items()}
    assert list(ends.values()) == [
        *("failed", "stopped early", "stopped", "finished", "finished")
    ]
    for slot in range(4):
        assert_empty_slot(other.trainer, slot)
    # It is killed in the middle, and goes on in the next layout.
    after = LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]
    folder = shutil.copytree(copies[len(copies) // 3], tmp_path / "run")
    resumed = resume(after, folder)
    sizes = MeshSizes() if after in DEPLOYMENTS else MeshSizes.parse(after)
    assert after in DEPLOYMENTS or resumed.trainer.plan.stages.sizes == sizes
    assert_same_on_meshes(one, resumed)
