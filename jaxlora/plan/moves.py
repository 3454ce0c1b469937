"""Foretells when a run with `replicas: auto` would move to other replicas."""

from collections.abc import Sequence

from jaxlora.common.counted import counted
from jaxlora.plan.foretell import Foretold, foretell
from jaxlora.train.plan.auto_replicas.moving import ReplicaChoice, has_rest
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.run_plan import RunPlan

_MOST_COMPARED = 4  # times that jobs end; each takes seconds


def foretell_moves(
    choice: ReplicaChoice,
    plan: RunPlan,
    jobs: Sequence[PreparedJob],
    foretold: Foretold,
) -> list[str]:
    """Returns in a line each what is compared when jobs end, and decided.

    Args:
        choice: The choice of replicas.
        plan: The plan with which the run begins.
        jobs: Its jobs.
        foretold: Its course if it does not move.

    Raises:
        ConfigError: It would move to replicas on which it cannot be planned.
    """
    lines, compared = [], 0
    sweep = plan.config.sweep
    search = None if sweep is None else sweep.search
    # Configurations may follow that are like those that have ended.
    holds_all = search is not None and len(search.points) < search.count
    left = [one for one in foretold.left if one and has_rest(plan, one)]
    names = {job.name for job in jobs}
    while left:
        if compared == _MOST_COMPARED:
            ends = counted(len(left), "further time")
            lines.append(f"replicas: auto: {ends} that jobs leave are not foretold")
            break
        positions, *left = left
        compared += 1
        there = {jobs[p.job].name for p in positions}
        ended = sorted(names - there)
        names = there
        over = [] if holds_all else [j.name for j in jobs if j.name not in there]
        move = choice.weigh(plan, jobs, positions, over)
        furthest = max(positions, key=lambda p: p.step)
        steps, job = counted(furthest.step, "step"), jobs[furthest.job].name
        verb = "has" if len(ended) == 1 else "have"
        why = f"when {', '.join(ended)} {verb} left, after {steps} of {job}"
        lines.append(move.note(why).text)
        if move.pays:
            plan = choice.plan(move, jobs)
            course = foretell(plan, jobs, positions)
            left = [one for one in course.left if one and has_rest(plan, one)]
    return lines
