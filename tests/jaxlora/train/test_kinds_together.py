"""Objectives, adapters and optimizers of all kinds in one run, each as if alone."""

import os
import signal
from collections.abc import Callable

import pytest

from jaxlora import Trainer
from jaxlora.errors import ConfigError
from jaxlora.train.report.summary import job_result
from tests.jaxlora.train.runs import outcome, run_of
from tests.jaxlora.train.test_contracts import assert_same_training
from tests.jaxlora.train.test_preferences import assert_same_score, preference_jobs

__all__ = ["preference_jobs"]  # a fixture of another file

CHANGES = {
    "reward": {"optimizer": "muon"},
    "kto": {"optimizer": "schedule_free_adamw", "lr_schedule": "constant"},
    "dpo": {"optimizer": "lion", "use_dora": True, "learning_rate": 1e-3},
    "simpo": {"optimizer": "adafactor", "use_dora": True, "dropout": 0.2},
}
KEPT_START = {
    "init_lora_weights": "pissa",
    "optimizer": "sgd",
    "optimizer_args": {"momentum": 0.5},
    "dropout": 0.0,
    "weight_decay": 0.0,
}


@pytest.fixture(scope="module")
def mixed(jobs, preference_jobs):
    """A job of each kind."""
    some = [preference_jobs[n].replace(**change) for n, change in CHANGES.items()]
    return [*some, jobs[3].replace(name="pissa", **KEPT_START)]


@pytest.mark.grid
def test_each_kind_trains_as_if_it_were_alone(train, mixed):
    together = train(mixed)
    for job in mixed:
        alone = train([job], max_concurrent_jobs=len(mixed))
        assert_same_training(together, alone, [job.name])
        if job.name == "reward":
            assert_same_score(together, alone)


def interrupt_once() -> Callable[[Trainer], None]:
    """Returns a function that interrupts the run when it is called first."""
    signals = iter([signal.SIGINT])

    def interrupt(trainer: Trainer) -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    return interrupt


@pytest.mark.grid
def test_a_resumed_run_of_all_kinds_ends_in_the_same_bits(train, mixed):
    whole = train(mixed, window_steps=1)
    half = train(mixed, window_steps=1, on_window=interrupt_once())
    assert half.result.interrupted
    resumed = outcome(half.trainer.config, half.trainer.model, resume=True)
    assert resumed.bytes == whole.bytes
    assert resumed.losses == whole.losses


@pytest.mark.usefixtures("compiled_when_called")
def test_a_kept_start_has_the_rank_of_the_run_file(model, jobs, tmp_path, caplog):
    """Its slot has twice as many, half of which are the first weights."""
    job = jobs[0].replace(**KEPT_START, rank=4)
    config = run_of(model, tmp_path / "run", [job], microbatch_tokens=1024)
    with caplog.at_level("INFO"):
        (state,) = Trainer(config, model).jobs
    assert "rank 4 (twice that in a slot) on" in caplog.text
    assert state.largest_rank == 8
    assert state.info().rank == job_result(state, tmp_path).rank == 4
    small = config.replace(slot_rank=4, output_dir=str(tmp_path / "small"))
    with pytest.raises(ConfigError, match=r"first weights that it keeps has rank 8"):
        Trainer(small, model)
