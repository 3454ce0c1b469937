"""Predicted and reported memory of a run, on devices that are made up."""

import random

import jax
import pytest

from jaxlora.common.comparison import Comparison
from jaxlora.memory.device_memory import DeviceMemory
from jaxlora.memory.need import MemoryNeed
from jaxlora.memory.run_memory import Reading, RunMemory, read_devices

GIB = 2**30
TOKENS = 8192
NEED = MemoryNeed(
    base_bytes=16 * GIB,
    adapter_bytes=4 * GIB,
    step_bytes=40 * GIB,
    tokens=TOKENS,
    where="",
    available=DeviceMemory(num_bytes=64 * GIB, source="made up"),
)


class Device:
    """Reports a peak that steps raise, and a limit."""

    def __init__(self, limit: float, peak: float = 20 * GIB):
        self.limit, self.peak = int(limit), int(peak)

    def step(self, num_bytes: float) -> None:
        self.peak = max(self.peak, int(num_bytes))

    def __call__(self) -> Reading:
        return Reading(peak=self.peak, limit=self.limit)


def test_the_peak_is_compared_with_the_prediction():
    device = Device(68 * GIB)
    memory = RunMemory(NEED, 4, device)
    device.step(61 * GIB)
    memory.note(2, TOKENS)
    assert memory.compared() == Comparison(predicted=60 * GIB, measured=61 * GIB)
    (line,) = memory.compared().line("peak memory", lambda n: f"{n / GIB:.0f} GiB")
    assert line == "peak memory: 61 GiB, 60 GiB predicted (1.7% more)"
    assert not list(Comparison(predicted=1.0).line("time", str))
    assert not list(Comparison(measured=1.0).line("time", str))


def test_all_slots_are_usable_where_a_job_takes_nothing():
    """The compiled run was found to fit; also if it uses nearly all there is."""
    device = Device(64 * GIB)
    memory = RunMemory(NEED, 4, device)
    assert memory.usable_slots(TOKENS) == 4
    for jobs in (1, 2, 3):
        device.step((61.6 + 0.01 * jobs) * GIB)
        memory.note(jobs, TOKENS)
        assert memory.usable_slots(TOKENS) == 4


def test_a_job_waits_where_nothing_is_left_and_the_line_has_the_arithmetic():
    device = Device(64 * GIB)
    memory = RunMemory(NEED, 4, device)
    device.step(63.8 * GIB)
    memory.note(2, TOKENS)
    assert memory.usable_slots(TOKENS) == 2  # what runs already goes on
    line = memory.explain(2, TOKENS)
    for part in ("base 16.00 GiB", "adapters 4.00 GiB", "8192 tokens", "64.00 GiB"):
        assert part in line
    assert "the start of a job 1.00 GiB" in line and "0.20 GiB" in line
    assert "microbatch_tokens" in line


@pytest.mark.parametrize("seed", range(4))
def test_500_joins_and_leaves_with_growing_memory(seed):
    """Each job keeps a little that no plan knows of; the limit is never exceeded."""
    rng, device = random.Random(seed), Device(66 * GIB)
    memory, running, refused = RunMemory(NEED, 32, device), 1, 0
    each = rng.uniform(0.05, 0.2) * GIB
    for _ in range(500):
        if rng.random() < 0.5 and running > 1:
            running -= 1
        elif running < memory.usable_slots(TOKENS):
            running += 1
        else:
            refused += 1
        took = (60.5 * GIB + each * running) * (1 + rng.uniform(0, 0.003))
        assert took + NEED.adapter_bytes / 32 <= device.limit
        device.step(took)
        memory.note(running, TOKENS)
    measured = memory.compared().measured
    assert measured is not None and measured == device.peak


def bad(*readings):
    """A device whose reports are these, one after the other; errors are raised."""
    left = list(readings)

    def read():
        found = left.pop(0) if left else None
        if isinstance(found, Exception):
            raise found
        return found

    return read


@pytest.mark.parametrize(
    "reading",
    [
        RuntimeError("lost"),
        Reading(peak=-1, limit=64 * GIB),
        Reading(peak=0, limit=0),
        Reading(peak=65 * GIB, limit=64 * GIB),
        Reading(peak=GIB, limit=64 * GIB),
    ],
)
def test_a_wrong_reading_changes_nothing(reading, caplog):
    memory = RunMemory(NEED, 4, bad(reading, reading, reading, reading))
    for _ in range(2):
        memory.note(2, TOKENS)
    assert memory.usable_slots(TOKENS) == 4
    assert memory.compared() == Comparison(predicted=60 * GIB)
    (warning,) = caplog.records
    assert "Predictions stay as they are" in warning.getMessage()


def test_missing_readings_are_no_fault(caplog):
    for memory in (RunMemory(NEED, 4, bad()), RunMemory(None, 4, bad())):
        memory.note(1, TOKENS)
        assert memory.usable_slots(TOKENS) == 4
        assert memory.compared().measured is None
    assert not caplog.records


def test_few_readings_are_made_of_each_number_of_jobs():
    device, count = Device(64 * GIB), 0

    def read():
        nonlocal count
        count += 1
        return device()

    memory = RunMemory(NEED, 4, read)
    for _ in range(100):
        memory.note(1, TOKENS)
        memory.note(2, TOKENS)
    assert count == 1 + 2 * 3


def test_the_fullest_device_is_read(monkeypatch):
    class Gpu:
        def __init__(self, peak):
            self.stats = None
            if peak is not None:
                self.stats = {"peak_bytes_in_use": peak, "bytes_limit": 100}

        def memory_stats(self):
            return self.stats

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu(3), Gpu(7), Gpu(None)])
    assert read_devices() == Reading(peak=7, limit=100)
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu(None)])
    assert read_devices() is None
