"""Microbatches of several compiled shapes: the same training, also when resumed."""

import threading

import pytest

from jaxlora import Trainer
from jaxlora.train.execute.feed import TickPacker
from jaxlora.train.execute.run_programs import FurtherPrograms
from tests.jaxlora.train.runs import LINEARS, InterruptAt, Outcome, run_of
from tests.jaxlora.train.test_contracts import assert_same_training

# A microbatch is taken to last a tenth of a second, as on a device of unknown speed.
FROM_TICK = 3
SHAPES = {"microbatch_shapes": [256], "shape_compile_seconds": FROM_TICK / 10}


@pytest.fixture(autouse=True)
def slow_ticks(monkeypatch):
    """A GPU of known speed begins with other shapes at the same tick."""
    monkeypatch.setattr("jaxlora.plan.run_plan._LEAST_SECONDS", 0.1)


@pytest.fixture
def rows(monkeypatch) -> list[int]:
    """The rows of each tick that is uploaded."""
    found = []

    def upload(self, packed):
        found.append(len(packed.token_ids))
        return original(self, packed)

    original = TickPacker.upload
    monkeypatch.setattr(TickPacker, "upload", upload)
    return found


@pytest.fixture(scope="module")
def small(jobs):
    """Jobs whose steps together fill less than half of a microbatch."""
    update = {"eval_every": None, "eval_fraction": 0.0, "steps": 8}
    return [job.replace(**update) for job in (jobs[1], jobs[5])]


def fill(outcome) -> float:
    return max(event["fill"] for event in outcome.of("window"))


def test_shapes_teach_the_same(train, small, rows):
    one = train(small, max_concurrent_jobs=3)
    num = len(rows)
    some = train(small, max_concurrent_jobs=3, **SHAPES)
    assert set(rows[:num]) == {512} == set(rows[num : num + FROM_TICK])
    assert 256 in rows[num + FROM_TICK :]
    assert_same_training(some, one, [job.name for job in small])
    assert fill(some) > 1.3 * fill(one)


@pytest.mark.parametrize(
    "num_rounds", [pytest.param(1, marks=pytest.mark.grid), FROM_TICK + 2]
)
def test_a_resumed_run_has_the_same_microbatches(
    model, small, rows, tmp_path, monkeypatch, num_rounds
):
    """Whether programs are ready late, as at the start, or at once, as after it."""
    needed = threading.Event()

    def late(self, *args):
        assert needed.wait(20)
        compile_one(self, *args)

    def wait_for(self, num):
        if num in self._compiled:
            needed.set()
        wait(self, num)

    compile_one, wait = FurtherPrograms._compile, FurtherPrograms.wait_for
    monkeypatch.setattr(FurtherPrograms, "_compile", late)
    monkeypatch.setattr(FurtherPrograms, "wait_for", wait_for)

    def train(name: str, *, resume=False, stop: int | None = None) -> Outcome:
        config = run_of(
            model,
            tmp_path / name,
            tuple(small),
            **{"microbatch_tokens": 512, "block_tokens": 16, "slot_dropout": True},
            **{"slot_rank": 8, "slot_targets": LINEARS, "window_steps": 1},
            max_concurrent_jobs=3,
            **SHAPES,
        )
        trainer = Trainer(config, model)
        callbacks = [] if stop is None else [InterruptAt(stop)]
        result = trainer.train(resume=resume, callbacks=callbacks)
        needed.set()
        return Outcome(trainer, result)

    whole = train("whole")
    num = len(rows)
    monkeypatch.setattr(FurtherPrograms, "_compile", compile_one)
    assert train("part", stop=num_rounds).result.interrupted
    num_before = len(rows) - num
    resumed = train("part", resume=True)
    assert resumed.bytes == whole.bytes and resumed.losses == whole.losses
    again = rows[num + num_before :]
    assert again == rows[num - len(again) : num]
