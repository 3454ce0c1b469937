"""The jobs of the mesh benchmark, and the orders in which their samples run."""

import itertools

import pytest

from jaxlora.adapters.adapter import Adapter
from jaxlora.bench.mesh.cases import Case, make_runs
from jaxlora.bench.mesh.orders import samples_of, windows
from jaxlora.scheduler import Lanes, Pipeline, violations

CASE = Case(
    model="tiny",
    mesh="stage=3",
    batch_samples=6,
    capacity=1024,
    block_tokens=32,
    longest_tokens=400,
)
START = Adapter(modules={})


@pytest.mark.parametrize("order", ["together", "one by one", "round robin"])
def test_every_order_runs_all_samples_by_the_rules(order):
    runs = make_runs(CASE, 12, [START] * 2)
    lanes = Lanes(pipeline=Pipeline.one_f_one_b(3))
    some = windows(order, runs, CASE.limits, lanes)
    assert len(some) == (2 if order == "one by one" else 1)
    held = []
    for window in some:
        samples = samples_of(window.jobs)
        held += samples
        assert not violations(window.schedule, samples, distance=3)
    assert sorted(held, key=repr) == sorted(samples_of(runs), key=repr)


def test_round_robin_has_at_most_so_many_samples_in_a_microbatch():
    runs, lanes = (
        make_runs(CASE, 6, [START] * 2),
        Lanes(pipeline=Pipeline.one_f_one_b(3)),
    )

    def most(*limit):
        (window,) = windows("round robin", runs, CASE.limits, lanes, *limit)
        return max(map(len, window.schedule.microbatches))

    assert most(1) == 1 < most()


def test_one_job_after_the_other_drains_between_batches():
    """The pipeline is empty when a batch enters: S - 1 no-ops are before it."""
    runs = make_runs(CASE, 8, [START])
    lanes = Lanes(pipeline=Pipeline.one_f_one_b(3))
    (window,) = windows("one by one", runs, CASE.limits, lanes)
    ticks = [{s.batch for s in m} for m in window.schedule.microbatches]
    groups = [
        (is_real, len(list(same))) for is_real, same in itertools.groupby(ticks, bool)
    ]
    assert {number for is_real, number in groups if not is_real} == {2}
    assert sum(is_real for is_real, _ in groups) == runs[0].num_steps > 1


def test_jobs_depend_on_the_number_of_tokens_only():
    runs = make_runs(CASE, 6, [START] * 2)
    again = make_runs(CASE, 12, [START] * 2)
    assert sum(run.prepared.train_data.num_tokens for run in runs.values()) >= 6 * 1024
    for slot, run in runs.items():
        assert run.num_steps < again[slot].num_steps
        assert run.prepared.lengths(0) == again[slot].prepared.lengths(0)
    assert max(max(run.prepared.lengths(0)) for run in runs.values()) <= 400


def test_a_case_goes_to_its_process_as_json():
    assert Case.from_json(CASE.to_json()) == CASE


def test_adapters_have_a_distribution_each():
    with pytest.raises(
        ValueError, match=r"adapters=\(5,\) must be numbers from 1 to 4"
    ):
        Case(model="tiny", mesh="stage=2", adapters=(5,))
