"""Resuming, and a second trainer, compile nothing that a fresh run did not."""

from typing import Any

import pytest

from jaxlora import Trainer
from tests.jaxlora.train import fused
from tests.jaxlora.train.counted_run import counting, interrupt
from tests.jaxlora.train.runs import TWO_SLOTS, AtWindow, run_of

# How many programs a run has of each function.
RUN = {
    "accumulate": 1,
    "evaluate": 1,
    "optimizer_step": 1,
    "write_slot": 3,
    "read_slot_rows": 1,
}


@pytest.fixture(params=["xla", pytest.param("fused", marks=fused.only_where_it_runs)])
def make_trainer(request, model, jobs, tmp_path):
    """Trainers of runs of three jobs through two slots, with evaluations."""
    settings: dict[str, Any] = TWO_SLOTS
    if request.param == "fused":
        model = fused.wide_model(tmp_path / "wide")
        more = {"microbatch_tokens": 512, "max_concurrent_jobs": 2}
        settings = fused.SETTINGS | more

    def make(name: str, **more) -> Trainer:
        config = run_of(
            model,
            tmp_path / name,
            jobs[:3],
            window_steps=1,
            checkpoint_every=1,
            **settings,
            **more,
        )
        return Trainer(config, model)

    return make


def test_a_second_trainer_of_the_same_shapes_compiles_nothing(make_trainer):
    make_trainer("first").train()
    with counting() as (compiled, _):
        second = make_trainer("second").train()
    assert {name: compiled[name] for name in RUN} == dict.fromkeys(RUN, 0)
    assert second.num_compilations == 0


def test_resuming_in_the_same_process_compiles_nothing(make_trainer):
    with pytest.raises(RuntimeError, match="stop here"):
        make_trainer("cut").train(callbacks=[AtWindow(interrupt)])
    with counting() as (compiled, _):
        make_trainer("cut").train(resume=True)
    assert {name: compiled[name] for name in RUN} == dict.fromkeys(RUN, 0)
