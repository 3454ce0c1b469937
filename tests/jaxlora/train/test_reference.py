"""The reference of DPO and KTO: kept or in the step, of the base or of the start."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxlora import LoraJob, Trainer
from jaxlora.adapters.adapter import Adapter, OutsideWeights
from jaxlora.data.order import JobOrder
from jaxlora.errors import ConfigError
from jaxlora.plan.job import prepared_job
from jaxlora.plan.job.chosen_modules import check_objective
from jaxlora.train.job_state import JobState
from tests.jaxlora.train.runs import InterruptAt, prepared_of, run_of
from tests.jaxlora.train.test_contracts import ROUNDING
from tests.jaxlora.train.test_preferences import write_pairs

JOB = {"rank": 4, "batch_size": 4, "learning_rate": 2e-2, "max_length": 96, "steps": 4}
# The reference is above all linears, so one of them is enough. DoRA and rows of tokens
# have to be off for it.
JOB |= {"target_modules": ["q_proj"], "dropout": 0.1}
JOB |= {"use_dora": True, "trainable_token_indices": [65, 98]}
# All runs share programs.
SHAPE = {"microbatch_tokens": 512, "max_concurrent_jobs": 4, "slot_dropout": True}
SHAPE |= {"block_tokens": 16, "slot_targets": JOB["target_modules"]}


@pytest.fixture
def train(train):
    return functools.partial(train, **SHAPE)


def job(name: str, objective: str, path: str, args: dict | None = None, **changes):
    data = {"path": path, "kind": "preference"} | changes.pop("data", {})
    settings = JOB | {
        "objective": objective,
        "objective_args": args or {},
        "data": data,
    }
    return LoraJob(name=name, **settings | changes)


def of_each(path: str, args: dict | None = None, **changes) -> list[LoraJob]:
    """Jobs of DPO and KTO, for which a run has the same programs in each test."""
    whole = {"modules_to_save": ["lm_head"], "trainable_token_indices": ()}
    given = {"dpo": {}, "kto": whole}
    return [job(n, n, path, args, **changes | own) for n, own in given.items()]


def test_in_the_step_it_is_the_one_that_is_kept(train, tmp_path):
    """After steps with DoRA, rows of tokens and heads, which have to be off for it."""
    path = write_pairs(tmp_path / "pairs.jsonl", 9, seed=0)
    held_out = {"path": write_pairs(tmp_path / "held_out.jsonl", 3, seed=1)}
    pairs = (
        of_each(path, {"reference_logps": how}, eval_data=held_out, eval_every=2)
        for how in ("kept", "in_step")
    )
    twins = [
        one.replace(name=f"{one.name}_{how}")
        for same in zip(*pairs, strict=True)
        for how, one in zip(("kept", "in_step"), same, strict=True)
    ]
    found = train(twins)
    for name in ("dpo", "kto"):
        kept, in_step = f"{name}_kept", f"{name}_in_step"
        for of in (found.losses, found.evals):
            assert of[in_step] == pytest.approx(of[kept], rel=ROUNDING)
        assert max(found.losses[kept]) - min(found.losses[kept]) > 1e-3
    notes = [str(note) for j in found.trainer.jobs for note in j.prepared.notes]
    lines = [line for line in notes if "in each step, by a forward" in line]
    assert len(lines) == 2 and all("as reference_logps says" in line for line in lines)
    # The adapter that a job starts from may be the reference instead.
    folder = found.trainer.output_dir / "adapters" / "dpo_kept"
    start = twins[0].replace(
        init_from=str(folder),
        learning_rate=0.0,
        dropout=0.0,
    )
    to_start = start.replace(name="start", objective_args={"reference": "start"})
    # With KTO, the programs are those of the run before.
    jobs = [to_start, start.replace(name="plain"), twins[2].replace(steps=1)]
    again = train(jobs)
    for of in (again.losses, again.evals):
        assert of["start"] == pytest.approx([np.log(2)] * len(of["start"]), abs=1e-4)
        assert of["plain"][0] != pytest.approx(np.log(2), rel=1e-3)


def test_a_resumed_job_goes_on_with_its_reference(model, tmp_path, monkeypatch):
    """By cost, it would be computed once for more steps than a pass has."""
    monkeypatch.setattr(prepared_job, "_MANY_TOKENS", 10)
    path = write_pairs(tmp_path / "pairs.jsonl", 26, seed=0)

    def trainer(steps: int) -> Trainer:
        config = run_of(
            model,
            tmp_path / "run",
            of_each(path, steps=steps),
            slot_rank=8,
            window_steps=1,
            checkpoint_every=1,
            **SHAPE,
        )
        return Trainer(config, model)

    assert trainer(6).train(callbacks=[InterruptAt(1)]).interrupted
    again = trainer(14)
    assert not any(one.prepared.runs_reference for one in again.jobs)
    result = again.train(resume=True)
    assert [one.progress.step for one in result.jobs] == [14, 14]
    assert all(one.runs_reference and not one.references for one in again.jobs)


def test_a_reference_that_cannot_be_had_is_refused():
    start = job("x", "dpo", "pairs.jsonl", {"reference": "start"})
    with pytest.raises(ConfigError, match=r"job 'x' has none: .* Set init_from"):
        check_objective(start)


def with_reference(start: Adapter | None, args: dict, **settings) -> JobState:
    """A job without data, of which only the settings and adapters are read."""
    prepared = prepared_of(
        settings=job("x", "dpo", "pairs.jsonl", args, **settings),
        start=start,
        reference=dataclasses.replace(start) if "reference" in args else None,
        order=JobOrder(num_samples=8, batch_size=4, seed=0, steps=9),
    )
    return JobState(prepared, Adapter(modules={}))


FRESH = Adapter(modules={})
MOVED = dataclasses.replace(
    FRESH, outside={"score": OutsideWeights(np.ones(2, np.float32))}
)


@pytest.mark.parametrize(
    ("start", "args", "settings", "trained", "evaluated"),
    [
        (None, {}, {}, {0}, {0}),
        (None, {}, {"warmup_steps": 3}, {0, 1}, {0, 1}),
        (None, {}, {"warmup_steps": 3, "continue_from": "runs/a"}, {0}, {0}),
        (MOVED, {}, {"init_from": "a"}, set(), set()),
        (MOVED, {"reference": "start"}, {"init_from": "a", "dropout": 0.0}, {0}, {0}),
        (MOVED, {"reference": "start"}, {"init_from": "a"}, set(), {0}),
        (MOVED, {"reference": "a"}, {"init_from": "a", "dropout": 0.0}, {0}, {0}),
    ],
)
def test_the_adapter_is_the_reference_before_it_moves(
    start, args, settings, trained, evaluated
):
    """Dropout changes what an adapter computes, unless it is fresh."""
    if start is not None:
        settings = {"use_dora": False, "trainable_token_indices": ()} | settings
    state = with_reference(start, args, **settings)
    for dropout, wanted in ((state.settings.dropout, trained), (0.0, evaluated)):
        steps = {s for s in range(9) if state._is_reference(s, dropout=dropout)}
        assert steps == wanted


def test_another_adapter_is_not_the_reference():
    state = with_reference(MOVED, {"reference": "b"}, init_from="a", dropout=0.0)
    object.__setattr__(state.prepared, "reference", FRESH)
    assert not state._is_reference(0, dropout=0.0)
