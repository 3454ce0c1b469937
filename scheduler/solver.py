"""Runs the HiGHS solver through PuLP and interprets its result."""

import math
from collections.abc import Mapping
from typing import Any

import highspy
import pulp

_TOLERANCE = 1e-6  # of objectives, which are integers


class SolverError(RuntimeError):
    """The solver failed, or gave an answer that cannot be right."""


def solve(
    problem: pulp.LpProblem, *, time_limit: float, seed: int
) -> tuple[int | None, bool]:
    """Minimizes an integer by HiGHS on one thread, from the values of the variables.

    Returns:
        The objective of the best solution, or None if none was found; and whether it is
        proved to be optimal. If the solver reached a limit, this is only so if the
        objective equals the lower bound.

    Raises:
        SolverError: HiGHS stopped for a reason other than a proof or a limit.
    """
    stats = run(problem, seed=seed, time_limit=time_limit)
    status = pulp.LpSolveStatus
    if stats.status not in (status.Optimal, status.TimeLimit, status.GapLimit):
        raise SolverError(f"HiGHS stopped with {stats.status.name!r}.")
    if not stats.has_solution or stats.objective is None:
        return None, False
    objective, bound = round(stats.objective), stats.best_bound
    at_bound = bound is not None and math.ceil(bound - _TOLERANCE) >= objective
    proved = at_bound or (bound is None and stats.status == status.Optimal)
    return objective, proved


def run(problem: pulp.LpProblem, *, seed: int, **limits: float):
    """Runs HiGHS on one thread and returns PuLP's statistics.

    The variables hold the start, if any, and afterwards the solution. The limits are
    options of HiGHS, such as `time_limit` in seconds.

    Raises:
        SolverError: HiGHS fails.
    """
    stats = _run(problem, seed, limits)
    if stats.status in (pulp.LpSolveStatus.NotSolved, pulp.LpSolveStatus.Undefined):
        # HiGHS keeps the number of threads of the first model in a process. It refuses
        # models with another number until its thread pool is closed.
        highspy.Highs.resetGlobalScheduler(True)
        stats = _run(problem, seed, limits)
    return stats


def _run(problem: pulp.LpProblem, seed: int, limits: Mapping[str, Any]):
    is_warm = any(v.varValue is not None for v in problem.variables())
    try:
        return problem.solve(_Solver(warmStart=is_warm, random_seed=seed, **limits))
    except pulp.PulpError as error:
        raise SolverError(f"HiGHS failed: {error}") from error


class _Solver(pulp.HiGHS):
    """PuLP's interface to HiGHS on one thread, which prints nothing."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = _QuietHighs()
        options = {"threads": 1} | self.optionsDict
        options.pop("warmStart", None)  # PuLP's own
        for name, value in options.items():
            lp.solverModel.setOptionValue(name, value)


class _QuietHighs(highspy.Highs):
    """HiGHS whose output is off before its callbacks, which print its license."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()
