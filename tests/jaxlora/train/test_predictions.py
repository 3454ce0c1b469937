"""A run's predictions of memory and time, beside what is measured."""

import json

import jax
import pytest
from rich.console import Console

from jaxlora import Trainer
from jaxlora.costs import device_profile
from jaxlora.costs.device_profile import PassCost
from jaxlora.pallas_kernels import device
from jaxlora.plan.mesh import machine
from jaxlora.plan.mesh.predict import SLOT_SECONDS
from jaxlora.run.folder import SUMMARY_FILE
from jaxlora.run.log import METRICS_FILE, read_events
from jaxlora.sweeps.files import print_summary
from jaxlora.train import run as train_run
from jaxlora.train.execute.executor import Outcomes
from jaxlora.train.execute.feed import TickWork
from jaxlora.train.loop import Window
from jaxlora.train.report.summary import Comparison
from tests.jaxlora.costs.test_device_profile import profile
from tests.jaxlora.train.runs import two_slots

GIB = 2**30
STEPS = {"a": 2, "b": 5, "c": 2}


def test_a_window_has_the_time_of_the_work_that_it_counts():
    """The device does the next window's first microbatch before an evaluation."""
    outcomes = Outcomes(steps={}, work={0: TickWork(num_microbatches=1)})
    first = Window(8.0)
    first.add(outcomes, 9.0)
    second = Window(first.end)
    # The clock stands still while jobs are evaluated.
    second.add(outcomes, 11.001)
    assert (first.seconds, second.seconds) == (1.0, pytest.approx(2.001))


@pytest.fixture
def config(model, jobs, tmp_path):
    return two_slots(
        model,
        tmp_path / "run",
        [jobs[0].replace(name=name, steps=steps) for name, steps in STEPS.items()],
        window_steps=2,
    )


@pytest.fixture
def measured(monkeypatch):
    """The rates of this device, as if they had been measured."""
    cost = PassCost(base=0.5, per_token=0.0, per_square=0.0)

    def find(profiles, spec):
        found = profile(cost=cost, link=None, adapter_bytes=0)
        estimate = device_profile.estimate(
            spec, machine.find_speed(device.device_kind())
        )
        return found.model_copy(update={"estimate": estimate}), "measured"

    monkeypatch.setattr(machine, "find_profile", find)
    monkeypatch.setattr(machine.device_profile, "parse", lambda *_: (profile(),))


def test_the_end_has_both(config, measured, monkeypatch):
    monkeypatch.setattr(train_run, "measured_peak", lambda: 3 * GIB)
    result = Trainer(config).train()
    events = read_events(result.output_dir / METRICS_FILE)
    windows = [e for e in events if e["event"] == "window"]
    predicted = sum(w["predicted_seconds"] for w in windows)
    microbatches = 0.5 * sum(w["num_microbatches"] for w in windows)
    changes = 2 * SLOT_SECONDS * len(result.jobs)  # each starts once, and ends once
    assert predicted == pytest.approx(microbatches + changes)
    time, memory = result.seconds, result.peak_bytes
    assert time.predicted == pytest.approx(predicted)
    assert time.measured == pytest.approx(sum(w["seconds"] for w in windows))
    assert memory.measured == 3 * GIB and 0 < memory.predicted < GIB
    console = Console(record=True, width=200)
    print_summary(result, console)
    text = console.export_text()
    assert "time of training: " in text and "peak memory: 3.00 GiB, " in text
    summary = json.loads((result.output_dir / SUMMARY_FILE).read_text())
    assert summary["peak_bytes"]["measured"] == 3 * GIB
    assert summary["seconds"]["predicted"] == time.predicted


def test_a_line_has_both_or_is_not_there():
    both = Comparison(predicted=60.0, measured=61.0)
    (line,) = both.line("peak memory", lambda n: f"{n:.0f} GiB")
    assert line == "peak memory: 61 GiB, 60 GiB predicted (1.7% more)"
    for lacks in (Comparison(predicted=1.0), Comparison(measured=1.0)):
        assert not list(lacks.line("time", str))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
def test_nothing_is_said_where_nothing_is_known(config):
    assert jax.local_devices()[0].memory_stats() is None
    result = Trainer(config).train()
    assert result.seconds.predicted is None and result.seconds.measured > 0
    assert result.peak_bytes.measured is None and result.peak_bytes.predicted > 0
    console = Console(record=True, width=200)
    print_summary(result, console)
    assert "predicted" not in console.export_text()
