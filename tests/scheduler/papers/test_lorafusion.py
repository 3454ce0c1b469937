"""Tests LoRAFusion's algorithm, including inputs on which LoRAFusion's code fails."""

import logging
import multiprocessing
import pathlib
import re
import subprocess
import sys
import time
import types
from concurrent.futures.process import BrokenProcessPool

import highspy
import hypothesis
import hypothesis.strategies as st
import pulp
import pytest

from jaxlora.scheduler import Limits, padded_tokens, solver, violations
from jaxlora.scheduler.papers import lorafusion
from jaxlora.scheduler.papers import lorafusion_milp as milp
from jaxlora.scheduler.papers.lorafusion import verify_and_fix
from jaxlora.scheduler.papers.spacing import with_no_ops
from jaxlora.scheduler.types import Pipeline
from scripts.bench.scheduler.lengths import jobs
from tests.scheduler.strategies import LIMITS, mixes, pipelines, sample

FOUR = Pipeline.one_f_one_b(4)
GREEDY = {"use_milp": False}
ROOT = pathlib.Path(__file__).parents[3]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(mixes(), pipelines(), st.booleans())
def test_keeps_every_rule(samples, pipeline, use_merge):
    options = {"use_merge": use_merge, **GREEDY}
    schedule = lorafusion.pack(samples, LIMITS, pipeline, **options)
    assert violations(schedule, samples, distance=pipeline.distance) == []
    again = lorafusion.pack(samples[::-1], LIMITS, pipeline, **options)
    assert schedule == again


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(mixes(max_jobs=3, max_samples=4), st.integers(1, 16))
def test_the_solver_keeps_every_rule(samples, num_stages):
    pipeline = Pipeline.one_f_one_b(num_stages)
    greedy = lorafusion.pack(samples, LIMITS, pipeline, use_merge=False, **GREEDY)
    found = lorafusion.pack(samples, LIMITS, pipeline, use_merge=False, time_limit=2)
    assert violations(found, samples, distance=pipeline.distance) == []
    full = lambda schedule: sum(bool(m) for m in schedule.microbatches)
    assert full(found) <= full(greedy)


# Groups


def of_lengths(*lengths):
    """Makes one job per length, with eight samples in a batch."""
    return [sample(j, 0, i, n) for j, n in enumerate(lengths) for i in range(8)]


def groups(samples, pipeline):
    return lorafusion.head_tail(lorafusion.statistics(samples), LIMITS, pipeline)


def test_the_longest_job_is_paired_with_the_shortest():
    samples = of_lengths(300, 100, 400, 200)
    assert groups(samples, FOUR) == ((2, 1), (0, 3))


def test_jobs_stay_alone_if_a_pair_would_wait_for_itself():
    assert groups(of_lengths(300, 200), FOUR) == ((0,), (1,))
    assert groups(of_lengths(300, 200), Pipeline()) == ((0, 1),)


def test_statistics():
    (found,) = lorafusion.statistics(
        [sample(5, 0, 0, 10), sample(5, 0, 1, 20), sample(5, 1, 0, 30)]
    )
    expected = lorafusion.Statistics(job=5, mean=20.0, std=10.0, batch_size=1.5)
    assert found == expected


# The solver


@pytest.mark.parametrize(
    ("lengths", "greedy", "found"),
    [
        ((8, 8, 7, 6, 6, 5), [19, 16, 5], [20, 20]),
        ((10, 10, 10, 9, 6, 4), [20, 19, 10], [20, 20, 9]),
    ],
)
def test_minimizes_the_bins_and_then_the_smallest_bin(lengths, greedy, found):
    limits = Limits(capacity=20, block_tokens=1)
    samples = [sample(0, 0, i, n) for i, n in enumerate(lengths)]
    for use_milp, expected in ((False, greedy), (True, found)):
        packed = pack_batch(samples, limits=limits, use_milp=use_milp)
        assert [padded_tokens(m, limits) for m in packed.microbatches] == expected
    assert packed.outcome is lorafusion.Outcome.OPTIMAL


def pack_batch(samples, **changes):
    options = {"limits": LIMITS, "time_limit": 5.0, "seed": 0, "use_milp": True}
    return lorafusion.pack_batch(samples, **options | changes)


def test_a_packing_that_reaches_the_bounds_needs_no_solver(monkeypatch):
    monkeypatch.setattr(lorafusion, "_two_stages", None)
    packed = pack_batch([sample(0, 0, 0, 7)])
    assert packed.outcome is lorafusion.Outcome.GREEDY


@pytest.mark.parametrize("cut", ["fewest_bins", "emptiest_bin"])
def test_a_packing_is_optimal_only_if_both_stages_are_proved(monkeypatch, cut):
    stage = getattr(milp, cut)
    unproved = lambda *a, **k: (stage(*a, **k)[0], False)
    monkeypatch.setattr(milp, cut, unproved)
    limits = Limits(capacity=20, block_tokens=1)
    samples = [sample(0, 0, i, n) for i, n in enumerate((8, 8, 7, 6, 6, 5))]
    packed = pack_batch(samples, limits=limits)
    assert packed.outcome is lorafusion.Outcome.FEASIBLE


def test_lower_bound_of_the_smallest_bin():
    """It holds at least one sample, and what does not fit in the other bins."""
    limits = Limits(capacity=20, block_tokens=2)
    samples = [sample(0, 0, i, n) for i, n in enumerate((10, 10, 5))]
    assert lorafusion._least(samples, limits, 2) == 3
    assert lorafusion._least(samples, limits, 1) == 13


def stopped(status, objective, bound):
    """Makes the statistics of a solver run."""
    return types.SimpleNamespace(
        status=status,
        has_solution=objective is not None,
        objective=objective,
        best_bound=bound,
    )


@pytest.mark.parametrize(
    ("status", "objective", "bound", "proved"),
    [
        ("Optimal", 3.0, 3.0, True),
        ("TimeLimit", 3.0, 1.2, False),
        ("TimeLimit", 3.0, None, False),
        ("TimeLimit", 3.0, 2.4, True),  # there is no integer in between
        ("TimeLimit", None, 2.0, False),
        ("GapLimit", 5.0, 3.0, False),
        ("Optimal", 3.0, 1.0, False),  # as PuLP 3 reported solutions at the time limit
    ],
)
def test_a_solution_is_proved_only_by_the_bound(
    monkeypatch, status, objective, bound, proved
):
    stats = stopped(getattr(pulp.LpSolveStatus, status), objective, bound)
    monkeypatch.setattr(solver, "_run", lambda *_: stats)
    found, is_proved = solver.solve(None, time_limit=1, seed=0)
    assert is_proved is proved
    assert (found is None) == (objective is None)


def hard(seed=1):
    """Makes a batch that takes the solver several seconds."""
    return jobs(["mix", "mix"], num_samples=24, batch_size=24, seed=seed)


def test_the_time_limit_holds_and_is_reported():
    limits = Limits(capacity=6144, block_tokens=64)
    start = time.perf_counter()
    packed = pack_batch(hard(), limits=limits, time_limit=0.3)
    assert time.perf_counter() - start < 3  # never retried with a longer limit
    assert packed.outcome in (lorafusion.Outcome.FEASIBLE, lorafusion.Outcome.GREEDY)


def test_without_time_for_the_solver_the_packing_is_greedy():
    limits = Limits(capacity=6144, block_tokens=64)
    packed = pack_batch(hard(), limits=limits, time_limit=1e-9)
    greedy = pack_batch(hard(), limits=limits, use_milp=False)
    assert packed == greedy


def no_solver(*_, **__):
    raise pulp.PulpSolverError("no licence today")


@pytest.mark.parametrize(
    ("target", "name", "broken", "reason"),
    [
        (pulp.LpProblem, "solve", no_solver, "SolverError: HiGHS failed: no licence"),
        (
            solver,
            "_run",
            lambda *_: stopped(pulp.LpSolveStatus.Infeasible, None, None),
            "SolverError: HiGHS stopped with 'Infeasible'",
        ),
    ],
)
def test_a_solver_failure_is_reported(
    monkeypatch, caplog, target, name, broken, reason
):
    monkeypatch.setattr(target, name, broken)
    samples = jobs(["mix"] * 4, num_samples=16, batch_size=8)
    limits = Limits(capacity=6144, block_tokens=64)
    caplog.set_level(logging.INFO, lorafusion.__name__)
    schedule = lorafusion.pack(samples, limits, FOUR)
    assert ": 0 packed optimally by the solver, 0 at its time limit" in caplog.text
    assert f"were packed greedily; the first: {reason}" in caplog.text
    assert schedule == lorafusion.pack(samples, limits, FOUR, **GREEDY)


def test_a_missing_pulp_is_reported(monkeypatch):
    module = "jaxlora.scheduler.papers.lorafusion_milp"
    monkeypatch.setitem(__import__("sys").modules, module, None)
    monkeypatch.delattr(module)
    limits = Limits(capacity=6144, block_tokens=64)
    packed = pack_batch(hard(), limits=limits)
    assert packed.outcome is lorafusion.Outcome.FAILED
    assert "Error: " in packed.reason


def test_refuses_a_solution_without_a_sample(monkeypatch):
    def forget(problem, **_):
        for variable in problem.variables():
            variable.setInitialValue(0)
        return 1, True

    monkeypatch.setattr(solver, "solve", forget)
    one = sample(0, 0, 0, 9)
    with pytest.raises(solver.SolverError, match="into 0 bins"):
        milp.fewest_bins([one], LIMITS, [(one,)], time_limit=1, seed=0)


def test_a_dead_worker_process_is_reported(monkeypatch, caplog):
    class Dead:
        def __init__(self, *_, **__):
            raise BrokenProcessPool("a process was killed")

    monkeypatch.setattr(lorafusion, "ProcessPoolExecutor", Dead)
    samples = jobs(["mix"] * 4, num_samples=16, batch_size=8)
    limits = Limits(capacity=6144, block_tokens=64)
    schedule = lorafusion.pack(samples, limits, FOUR, num_workers=2)
    assert schedule == lorafusion.pack(samples, limits, FOUR, **GREEDY)
    assert "first: BrokenProcessPool: a process was killed" in caplog.text
    assert "died" in caplog.text


SMALL = """
import pulp
from jaxlora.scheduler import solver
problem = pulp.LpProblem("small", pulp.LpMinimize)
x = problem.add_variable("x", lowBound=0, cat="Integer")
problem += 2 * x >= 5
problem += x + 0
assert solver.solve(problem, time_limit=5, seed=0) == (3, True)
"""


def test_the_solver_prints_nothing():
    """In a process of its own, as HiGHS would print its license only once."""
    command = [sys.executable, "-c", SMALL]
    ran = subprocess.run(command, capture_output=True, cwd=ROOT)
    assert (ran.stdout, ran.stderr, ran.returncode) == (b"", b"", 0)


def test_solves_after_a_model_with_more_threads():
    """HiGHS keeps the number of threads of the first model in a process."""
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.addVar(0.0, 1.0)
    other.run()
    exec(SMALL)


def test_the_result_does_not_depend_on_the_number_of_processes(caplog):
    caplog.set_level(logging.INFO, lorafusion.__name__)
    samples = jobs(["xsum", "wikisum"], num_samples=24, batch_size=6)
    limits = Limits(capacity=6144, block_tokens=64)
    alone, spread = (
        lorafusion.pack(samples, limits, FOUR, num_workers=n) for n in (1, 2)
    )
    assert alone == spread
    of_one, of_two = (record.getMessage() for record in caplog.records)
    assert of_one == of_two
    assert ": 0 packed optimally" not in of_one
    assert multiprocessing.active_children() == []


def test_reports_every_batch(caplog):
    caplog.set_level(logging.INFO, lorafusion.__name__)
    samples = jobs(["cnn", "mix"], num_samples=12, batch_size=6)
    limits = Limits(capacity=6144, block_tokens=64)
    lorafusion.pack(samples, limits, FOUR)
    (record,) = caplog.records
    assert record.getMessage().startswith("4 batches: ")
    _, *counts = (int(n) for n in re.findall(r"\d+", record.getMessage()))
    assert sum(counts) == 4


# Inputs on which LoRAFusion's code fails


@pytest.mark.parametrize(("num_stages", "no_ops"), [(1, 0), (4, 9), (8, 21), (16, 45)])
def test_one_job_gets_enough_no_ops(num_stages, no_ops):
    """LoRAFusion's repair adds 6 no-ops and leaves violations."""
    samples = [sample(0, b, 0, 400) for b in range(4)]
    pipeline = Pipeline.one_f_one_b(num_stages)
    schedule = lorafusion.pack(samples, LIMITS, pipeline)
    assert violations(schedule, samples, distance=num_stages) == []
    assert sum(not m for m in schedule.microbatches) == no_ops


def test_no_ops_come_right_before_the_batch_that_waits():
    a0, b0, a1 = sample(0, 0, 0, 9), sample(1, 0, 0, 9), sample(0, 1, 0, 9)
    order = [(a0,), (b0,), (a1,)]
    assert list(with_no_ops(order, 4)) == [(a0,), (b0,), (), (), (a1,)]


def test_ragged_last_batches_and_jobs_of_different_lengths():
    """LoRAFusion refuses ragged batches, and drops the last batches of longer jobs."""
    samples = jobs(["mix"] * 3, num_samples=[19, 40, 5], batch_size=[8, 6, 8])
    limits = Limits(capacity=6144, block_tokens=64)
    schedule = lorafusion.pack(samples, limits, FOUR, **GREEDY)
    assert violations(schedule, samples, distance=4) == []


def test_a_sample_over_the_capacity_is_refused_before_anything_runs(monkeypatch):
    """LoRAFusion makes a microbatch that exceeds the capacity."""
    monkeypatch.setattr(lorafusion, "pack_batch", None)
    with pytest.raises(ValueError, match="job 2 has 513 tokens, over the capacity of"):
        lorafusion.pack([sample(2, 0, 0, 513)], LIMITS, FOUR)


def test_a_schedule_that_breaks_a_rule_is_never_returned():
    one = sample(0, 0, 0, 9)
    with pytest.raises(RuntimeError, match=r"violates 1 rules; the first: .* 2 times"):
        verify_and_fix([(one,), (one,)], [one], LIMITS, FOUR)


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 0}, "time_limit must be positive, got 0"),
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        lorafusion.pack([], LIMITS, FOUR, **options)


def test_refuses_a_sample_that_is_given_twice():
    with pytest.raises(ValueError, match="given twice"):
        lorafusion.pack([sample(0, 0, 0, 9)] * 2, LIMITS, FOUR)


def test_nothing_to_schedule():
    assert lorafusion.pack([], LIMITS, FOUR).microbatches == ()
