"""The device has its next microbatch before the host asks what a step did."""

import re

import jax
import pytest

from jaxlora import RunConfig, Trainer
from jaxlora.train.executor import Executor


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
    an optimiser step is; r, the host waits for values; w, a window ends.
    """
    quiet = {"eval_fraction": 0.0, "eval_every": None, "steps": 8, "warmup_steps": 0}
    config = RunConfig(
        model=str(model.folder),
        output_dir=str(tmp_path / "run"),
        jobs=[job.model_copy(update=quiet) for job in jobs[:3]],
        microbatch_tokens=256,
        block_tokens=16,
        window_steps=4,
        checkpoint_every=None,
    )
    trainer, events = Trainer(config, model), []
    steps, device_get = trainer._steps, jax.device_get
    steps.accumulate = Watched(steps.accumulate, "m", events)
    steps.step = Watched(steps.step, "s", events)

    def read(tree):
        events.append("r")
        return device_get(tree)

    def on_window(trainer):
        events.append("w")

    run_window = Executor.train

    def guarded(*args):
        # On a GPU, this refuses any other way of waiting for values.
        with jax.transfer_guard_device_to_host("disallow"):
            return run_window(*args)

    monkeypatch.setattr(jax, "device_get", read)
    monkeypatch.setattr(Executor, "train", guarded)
    trainer.train(on_window=on_window)
    return "".join(events)


def test_the_device_never_waits_for_the_host(watched):
    """No job ends in the first window: the host only reads losses and norms."""
    window, _ = watched.split("w", 1)
    # Each step is read right after the microbatch that follows it; the last at the end.
    assert re.fullmatch("m+s(mrm*s)*r", window), window
    assert window.count("s") == window.count("r") > 4


def test_jobs_that_step_together_share_a_call(watched):
    window, _ = watched.split("w", 1)
    assert "ss" not in window and window.count("s") <= window.count("m")
