"""One device: the order of its work, and a job that is released within a window."""

import re

import jax
import numpy as np
import pytest

from jaxlora import Callback, RunConfig, Trainer
from jaxlora.train.execute.executor import Executor
from jaxlora.train.execute.layout import Layout
from scripts.bench.mesh.fixed_ticks import FixedTicks, pack_whole
from tests.jaxlora.train.runs import AtWindow, plan_and_jobs, run_of


class Watched:
    """A compiled function that notes when the device is given it."""

    def __init__(self, jitted, letter: str, events: list[str]):
        self._jitted, self._letter, self._events = jitted, letter, events

    def __call__(self, *args):
        self._events.append(self._letter)
        return self._jitted(*args)

    def __getattr__(self, name: str):
        return getattr(self._jitted, name)


@pytest.fixture
def watched(model, jobs, tmp_path, monkeypatch):
    """Trains three jobs that are never evaluated.

    Returns what happened, a letter an event: m, a microbatch is given to the device; s,
    an optimizer step is; r, the host waits for values; w, a window ends; e, a job does.
    """
    quiet = {"eval_fraction": 0.0, "eval_every": None, "steps": 8, "warmup_steps": 0}
    config = run_of(
        model,
        tmp_path / "run",
        [job.replace(**quiet) for job in jobs[:3]],
        microbatch_tokens=256,
        block_tokens=16,
        window_steps=2,
        checkpoint_every=None,
    )
    trainer, events = Trainer(config, model), []
    (stage,), device_get = trainer.layout.stages, jax.device_get
    steps = stage.steps
    steps.accumulate = Watched(steps.accumulate, "m", events)
    steps.step = Watched(steps.step, "s", events)

    def read(tree):
        events.append("r")
        return device_get(tree)

    def on_window(trainer):
        events.append("w")

    run = Executor.run

    def guarded(*args):
        # On a GPU, this refuses any other way of waiting for values.
        with jax.transfer_guard_device_to_host("disallow"):
            yield from run(*args)

    monkeypatch.setattr(jax, "device_get", read)
    monkeypatch.setattr(Executor, "run", guarded)

    class AtEnd(Callback):
        def on_job_end(self, event):
            events.append("e")

    trainer.train(callbacks=[AtWindow(on_window), AtEnd()])
    return "".join(events)


def test_the_device_never_waits_for_the_host(watched):
    """The host only reads losses and norms until the first job ends."""
    before, _ = watched.split("e", 1)
    events = before.replace("w", "")  # a window's end is no break
    assert len(events) < len(before) - 1
    # Each step is read right after the microbatch that follows it. At the end of a
    # job, its adapter is read as well.
    assert re.fullmatch("m+s(mrm*s)*mrr", events), events
    assert events.count("s") == events.count("r") - 1 > 4


def test_jobs_that_step_together_share_a_call(watched):
    events, _ = watched.split("e", 1)
    assert "ss" not in events and events.count("s") <= events.count("m")


# ---- driven by hand ------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_hand(model, jobs):
    """Runs three steps of three jobs; may release a slot after its first step.

    Returns the slots of each item, the outcomes by slot, and the slots' tables at the
    end.
    """
    # All learn from the start.
    some = [job.replace(warmup_steps=0) for job in jobs[:3]]
    config = RunConfig(
        model=str(model.folder), jobs=some, microbatch_tokens=256, block_tokens=16
    )
    plan, started = plan_and_jobs(config, model)
    runs, layout = dict(enumerate(started)), Layout.of(plan.stages)
    samples = [
        sample
        for slot, run in runs.items()
        for step in range(3)
        for sample in run.batch(slot, step).to_schedule()
    ]
    schedule = pack_whole(samples, config.limits, "joint")

    def run(release: int | None = None):
        slots = layout.empty_slots()
        executor = Executor(layout, model.params, slots, config.limits)
        for slot, job in runs.items():
            executor.load(slot, slots.pad(job.start), job.settings.optimizer)
        items, outcomes = [], {slot: [] for slot in runs}
        source = FixedTicks(schedule)
        for item in executor.run(source, runs):
            items.append(sorted(item.steps))
            for slot, outcome in item.steps.items():
                outcomes[slot].append(outcome)
            if release in item.steps:
                source.drop(release)
                executor.release(release)
        return items, outcomes, jax.device_get(slots.tables[0].state)

    return run, schedule


def test_every_step_is_reported_once(by_hand):
    run, _ = by_hand
    _, outcomes, state = run()
    assert {slot: len(mine) for slot, mine in outcomes.items()} == {0: 3, 1: 3, 2: 3}
    assert not any(gradients.any() for gradients in state.pending.gradients.values())


def kept_tables(state):
    return {"params": state.params} | state.optimizer_state


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_released_slot_takes_no_further_step(by_hand, slot):
    """It ends up empty; the others take the same steps, to the bit."""
    run, _ = by_hand
    _, whole, before = run()
    items, outcomes, state = run(release=slot)
    assert outcomes == whole | {slot: whole[slot][:1]}
    assert sum(slot in item for item in items) == 1
    others = [s for s in range(3) if s != slot]
    for kind, tables in kept_tables(state).items():
        for path, table in tables.items():
            assert not table[slot].any(), path
            expected = kept_tables(before)[kind][path]
            np.testing.assert_array_equal(table[others], expected[others])
    assert not any(gradients.any() for gradients in state.pending.gradients.values())
