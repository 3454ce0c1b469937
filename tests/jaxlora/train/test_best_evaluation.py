"""Which evaluation of a job is its best one, and what early stopping counts."""

import dataclasses
import math
import types

import pytest

from jaxlora import LoraJob
from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.run.job_progress import JobProgress
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from jaxlora.train.job_state import JobState
from tests.jaxlora.train.runs import prepared_of


def job(**settings) -> JobState:
    """A job without data, of which only the settings are read."""
    common = {"eval_fraction": 0.5, "eval_every": 1, "keep_best": True}
    common |= {"name": "a", "data": {"path": "none"}}
    made = LoraJob(**common | settings)
    return JobState(prepared_of(settings=made), Adapter(modules={}))


def evaluate(state: JobState, evaluations, **how) -> list[bool]:
    """Records (loss, metric) of a step each; returns which were the best so far."""
    found = []
    for loss, metric in evaluations:
        found.append(state.note_eval(loss, metric, by_set={}, **how))
        state.update(step=state.progress.step + 1)
    return found


TIES = {
    "the loss falls": ([(2.0, 0.6), (1.5, 0.6), (1.0, 0.6)], 2),
    "the loss falls at 0": ([(2.0, 0.0), (1.5, 0.0), (1.7, 0.0)], 1),
    "the loss rises": ([(2.0, 0.6), (2.5, 0.6), (3.0, 0.6)], 0),
    "all is equal": ([(2.0, 0.6), (2.0, 0.6), (2.0, 0.6)], 2),
    "the metric decides first": ([(2.0, 0.6), (1.0, 0.5), (3.0, 0.7)], 2),
    "a tie with an earlier best": ([(2.0, 0.6), (1.0, 0.5), (1.9, 0.6)], 2),
    "losses alone": ([(2.0, None), (1.0, None), (1.0, None)], 2),
    "no finite metric": ([(2.0, math.nan), (1.0, 0.2), (0.5, math.nan)], 1),
}


@pytest.mark.parametrize("is_maximized", [True, False])
@pytest.mark.parametrize("case", TIES)
def test_ties_go_by_the_loss_and_then_to_the_later_step(case, is_maximized):
    evaluations, step = TIES[case]
    sign = 1 if is_maximized else -1
    signed = [(x, None if y is None else sign * y) for x, y in evaluations]
    state = job()
    found = evaluate(state, signed, is_maximized=is_maximized)
    progress = state.progress
    assert progress.best_step == step
    assert max(i for i, is_best in enumerate(found) if is_best) == step
    assert (progress.best_eval, progress.best_metric) == signed[step]


def test_a_job_that_was_resumed_decides_the_same():
    """The progress that a checkpoint keeps is enough, between any two."""
    evaluations = [(2.0, 0.6), (1.5, 0.6), (1.5, 0.7), (1.4, 0.7), (1.6, 0.7)]
    whole = job()
    found = evaluate(whole, evaluations, is_maximized=True)
    assert found == [True, True, True, True, False]
    for border in range(len(evaluations)):
        first, second = job(), job()
        before = evaluate(first, evaluations[:border], is_maximized=True)
        second.progress = JobProgress(**dataclasses.asdict(first.progress))
        after = evaluate(second, evaluations[border:], is_maximized=True)
        assert before + after == found and second.progress == whole.progress


NO_WEIGHTS = ParkedSlot(params={}, optimizer_state={"mu": {}, "nu": {}})


def test_a_copy_goes_on_and_counts_its_best_anew():
    """The best weights are exported by name, and the copy has exported nothing."""
    parent, copy = job(), job(name="copy")
    evaluate(parent, [(2.0, 0.5), (1.0, 0.6), (3.0, 0.5)], is_maximized=True)
    assert parent.progress.evals_without_gain == 1
    copy.start_as_copy(parent, NO_WEIGHTS)
    wanted = dataclasses.replace(
        parent.progress,
        status="paused",
        reason="it starts as a copy of a",
        best_eval=None,
        best_step=None,
        best_metric=None,
        evals_without_gain=0,
    )
    assert copy.progress == wanted and copy.parked is NO_WEIGHTS
    assert copy.progress.step == 3
    evaluate(copy, [(2.5, 0.4)], is_maximized=True)
    assert copy.progress.best_step == 3
    assert parent.progress.best_eval == 1.0


def test_a_running_job_is_copied_after_its_batch():
    """The batch is on the device already. A paused job is copied as it is."""
    state = job()
    state.update(step=3, slot=0)
    assert state.next_border == 4
    state.update(slot=None)
    state.parked = NO_WEIGHTS
    assert state.next_border == 3


@pytest.mark.parametrize(
    ("evaluations", "delta", "without_gain"),
    [
        ([(2.0, 0.5), (1.5, 0.5), (1.0, 0.5)], 0.0, 0),
        ([(2.0, 0.5), (1.5, 0.5), (1.4, 0.5)], 0.25, 1),
        ([(2.0, 0.5), (2.0, 0.5), (2.5, 0.5)], 0.0, 2),
        ([(2.0, 0.5), (1.0, 0.4), (0.5, 0.3)], 0.0, 2),
        ([(2.0, 0.5), (3.0, 0.6), (4.0, 0.7)], 0.25, 2),
        ([(2.0, None), (1.5, None), (1.4, None)], 0.25, 1),
        ([(2.0, None), (2.0, None), (2.0, None)], 0.0, 2),
        ([(2.0, 0.5), (1.5, math.nan)], 0.0, 1),
    ],
)
def test_early_stopping_counts_a_lower_loss_at_an_equal_metric(
    evaluations, delta, without_gain
):
    state = job(early_stopping=2, early_stopping_delta=delta)
    evaluate(state, evaluations, is_maximized=True)
    assert state.progress.evals_without_gain == without_gain
    assert state.has_stalled() == (without_gain == 2)


@pytest.mark.parametrize(
    ("progress", "keep_best", "why"),
    [
        ({"step": 4, "best_step": 0}, True, "no later evaluation is better"),
        ({"step": 0, "best_step": 0}, True, "it took no step"),
        ({"step": 0, "best_step": 0}, False, "it took no step"),
        ({"step": 4, "best_step": 2}, True, None),
        ({"step": 4, "best_step": 0}, False, None),
        ({"step": 0, "status": "failed"}, False, None),
    ],
)
def test_an_export_of_step_0_is_named(progress, keep_best, why, caplog):
    state = job(keep_best=keep_best)
    state.progress = JobProgress(**{"status": "finished", "first_eval": 1.0} | progress)
    state.parked = object()
    run = types.SimpleNamespace(
        export=lambda job: None,
        _run=types.SimpleNamespace(send_of=lambda *args, **values: None),
    )
    JobLifecycle._end(run, state)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    text = f"a: the exported adapter is that of step 0, before any training: {why}"
    assert warnings == ([] if why is None else [text])
