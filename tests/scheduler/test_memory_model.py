"""The memory model against simulated devices that differ from what was planned."""

import random

import numpy as np
import pytest
import scipy.optimize

from jaxlora.scheduler import memory_model
from jaxlora.scheduler.memory_model import Coefficients, Doubt, Load, MemoryModel

GIB = 2**30
PLANNED = Coefficients(
    base=16 * GIB, per_job=0.6 * GIB, per_token=3 * 2**20, per_square=0.0
)
LARGEST = Load(jobs=16, tokens=8192, squares=8192 * 2048)
# Every part of the estimate may be wrong here.
DOUBT = Doubt(base=0.05, per_job=0.05, per_token=0.05, per_square=0.05)


class Device:
    """A device whose allocator wastes a part of what a step needs, and remembers."""

    def __init__(self, seed: int, *, waste: float = 0.006, offset: float = 1.3 * GIB):
        rng = self._rng = random.Random(seed)
        self._waste, self.peak = waste, 0.0
        self._true = Coefficients(
            base=PLANNED.base + offset,
            per_job=PLANNED.per_job * rng.uniform(0.8, 1.15),
            per_token=PLANNED.per_token * rng.uniform(0.85, 1.1),
            per_square=40.0 * rng.uniform(0, 1),
        )

    def true(self, load: Load) -> float:
        return self._true(load)

    def run(self, load: Load) -> float:
        """Runs a step; returns the bytes that it took."""
        took = self.true(load) * (1 + self._rng.uniform(0, self._waste))
        self.peak = max(self.peak, took)
        return took


@pytest.mark.parametrize("seed", range(12))
def test_500_random_joins_and_leaves_never_exceed_a_limit(seed):
    rng, device, limit = random.Random(seed), Device(seed), 50 * GIB
    model = MemoryModel(PLANNED, LARGEST, DOUBT)
    running: list[tuple[int, int]] = []  # tokens and squares that each job asks for
    waiting: list[tuple[int, int]] = []
    errors, most = [], 0.0

    def load(jobs) -> Load:
        tokens = max(job[0] for job in jobs)
        return Load(jobs=len(jobs), tokens=tokens, squares=max(j[1] for j in jobs))

    for _ in range(500):
        if running and rng.random() < 0.5:
            running.pop(rng.randrange(len(running)))
        else:
            tokens = rng.choice((2048, 4096, 8192))
            waiting.append((tokens, tokens * rng.choice((256, 1024, 2048))))
        while waiting:
            after = load([*running, waiting[0]])
            # A run with a single job was checked when it was compiled.
            if after.jobs > 16 or (running and model.bound(after) > limit):
                if after.jobs <= 16 and model.num_observed >= 5:
                    assert device.true(after) > 0.95 * limit  # it is no empty room
                break
            running.append(waiting.pop(0))
            predicted, took = model.predict(after), device.run(after)
            assert took <= limit
            # Below an earlier peak, nothing is seen of a load.
            if model.num_observed >= 5 and took > 0.7 * limit:
                errors.append(abs(predicted / took - 1))
            model.observe(after, device.peak)
            most = max(most, took)
        del waiting[3:]
    assert len(errors) > 100
    assert np.mean(errors) < 0.005 and max(errors) < 0.02
    assert most > 0.94 * limit


def test_a_correct_plan_stays_as_it_is():
    model = MemoryModel(PLANNED, LARGEST)
    for jobs in range(1, 17):
        load = Load(jobs=jobs, tokens=8192)
        model.observe(load, PLANNED(load))
    for mine, planned in zip(model.coefficients.row, PLANNED.row, strict=True):
        assert mine == pytest.approx(planned, rel=1e-6, abs=1)


def test_an_offset_does_not_become_a_cost_of_each_job():
    """Slots are allocated at the start, so that a job adds nothing by the plan."""
    planned = Coefficients(base=20 * GIB, per_token=3 * 2**20)
    model = MemoryModel(planned, Load(jobs=64, tokens=8192))
    one = Load(jobs=1, tokens=8192)
    model.observe(one, planned(one) + 2 * GIB)
    many = Load(jobs=64, tokens=8192)
    assert model.predict(many) == pytest.approx(model.predict(one), rel=0.005)
    assert model.predict(one) == pytest.approx(planned(one) + 2 * GIB, rel=0.005)


def test_peaks_that_do_not_rise_are_bounds_only():
    model = MemoryModel(PLANNED, LARGEST, DOUBT)
    large, small = Load(jobs=8, tokens=8192), Load(jobs=1, tokens=2048)
    model.observe(large, PLANNED(large))
    before = model.coefficients
    model.observe(small, PLANNED(large))
    assert model.coefficients == before and model.num_observed == 1
    # Something that was loaded before took more than a step does.
    loaded = MemoryModel(PLANNED, LARGEST, DOUBT, peak=1.2 * PLANNED(large))
    loaded.observe(large, 1.2 * PLANNED(large))
    assert loaded.num_observed == 0
    lower = MemoryModel(PLANNED, LARGEST, DOUBT, peak=0.9 * PLANNED(large))
    lower.observe(large, 0.9 * PLANNED(large))
    assert lower.predict(large) == pytest.approx(0.9 * PLANNED(large), rel=0.01)


def test_a_bound_follows_what_has_run():
    model = MemoryModel(PLANNED, LARGEST, DOUBT)
    one, two = Load(jobs=4, tokens=4096), Load(jobs=5, tokens=4096)
    assert model.bound(one) == pytest.approx(1.05 * PLANNED(one))
    model.observe(one, 0.9 * PLANNED(one))
    assert model.bound(one) == pytest.approx(1.01 * 0.9 * PLANNED(one))
    job = model.coefficients.per_job
    assert model.bound(two) == pytest.approx(model.bound(one) + 1.25 * job)
    # Another job that takes nothing fits as well as the present ones.
    slots = MemoryModel(Coefficients(base=20 * GIB), Load(jobs=64, tokens=1))
    slots.observe(Load(jobs=1, tokens=1), 20 * GIB)
    bound = slots.bound(Load(jobs=64, tokens=1))
    assert bound == pytest.approx(1.01 * 20 * GIB, rel=1e-3)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_coefficients_are_refused(bad):
    with pytest.raises(ValueError, match="negative or not finite"):
        Coefficients(base=bad)


def test_the_fit_is_that_of_a_well_kept_solver():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(rng.integers(4, 20), 4))
        y = x @ rng.normal(size=4) + rng.normal(size=len(x))
        wanted, _ = scipy.optimize.nnls(x, y)
        found = memory_model._nonnegative_solution(x, y)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
