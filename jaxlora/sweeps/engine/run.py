"""Runs a sweep over several groups of devices: the place where its parts are joined."""

import contextlib
import dataclasses
import json
import logging
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxlora.common.background import StopRequest
from jaxlora.common.counted import counted
from jaxlora.common.note import log_notes
from jaxlora.config import RunConfig
from jaxlora.errors import CheckpointError
from jaxlora.run.folder import (
    RUN_FILE,
    SWEEP_LEDGER,
    check_folder,
    check_writable,
    clean_up,
)
from jaxlora.run.lock import RunLock, find_owner
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sweeps.decisions import check_same_rungs, halving_of
from jaxlora.sweeps.engine.driver import Driver
from jaxlora.sweeps.engine.group_plan import GroupPlan, GroupPlans, plan_in_process
from jaxlora.sweeps.engine.groups import Group
from jaxlora.sweeps.engine.launch import Launcher, divide, divide_cores
from jaxlora.sweeps.engine.ledger import Ledger, has_ledger
from jaxlora.sweeps.engine.requests import Requests
from jaxlora.sweeps.engine.state import GROUPS, SweepState
from jaxlora.sweeps.engine.transport import Workers
from jaxlora.sweeps.suggesting import Suggestions

if TYPE_CHECKING:
    from jaxlora.train.report.summary import RunResult

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "jaxlora.sweeps.engine.worker")
_END_SECONDS = 150.0  # in which the workers of a driver that was killed end themselves


def run_groups(
    config: RunConfig,
    *,
    resume: bool = False,
    on_start: Callable[[pathlib.Path], None] = lambda folder: None,
) -> "RunResult":
    """Trains the configurations of a sweep in several groups of devices.

    Each group is a process with a copy of the base. This process decides what each of
    them trains and what ends early; it does not start JAX's devices. On Ctrl-C (or
    SIGTERM) the groups write their checkpoints and end.

    Args:
        config: The run; `sweep.groups` or `sweep.ray` names the groups.
        resume: Continue the sweep that has begun in `output_dir`.
        on_start: Is called with `output_dir` before the groups start.

    Raises:
        CheckpointError: `output_dir` holds another run or nothing to resume, or is in
            use.
        ConfigError: There are too few devices, or a worker refuses a setting.
        ProcessError: The workers of all groups have ended again and again.
        StorageError: A file cannot be written.
    """
    log_notes(config.notes)
    search = Suggestions(config)
    folder = pathlib.Path(config.output_dir)
    check_writable(folder)
    assert config.sweep is not None
    with contextlib.ExitStack() as opened:
        opened.enter_context(RunLock(folder))
        plans = None
        if config.sweep.groups == "auto" and not has_ledger(folder):
            plans = plan_in_process(config)  # before the sweep has begun
        ledger = opened.enter_context(contextlib.closing(_open(folder, resume=resume)))
        state = SweepState(config.jobs, config.sweep.early_exit, config.sweep.metric)
        check_same_sweep(state, ledger)
        if config.sweep.groups == "auto":
            plans = _kept(plans, config, ledger)
        if plans is None:
            groups = _groups(config)
        else:
            groups = [_planned_group(config, plans, one) for one in plans.groups]
        on_start(folder)
        meshes = [MeshSizes.parse(group.run["mesh"]) for group in groups]
        with _open_workers(config, meshes) as workers:
            driver = Driver(folder, state, ledger, workers, groups, search)
            with StopRequest("the groups write their checkpoints and end") as stop:
                interrupted = driver.run(lambda: stop.requested, Requests(folder))
        from jaxlora.sweeps.engine.result import write_result

        predicted = None if plans is None else plans.seconds
        return write_result(
            config,
            driver.state,
            num_devices=[mesh.num_devices for mesh in meshes],
            interrupted=interrupted,
            predicted=predicted,
        )


def _open(folder: pathlib.Path, *, resume: bool) -> Ledger:
    """Opens the ledger, when no worker of an earlier driver trains any more."""
    has_begun = has_ledger(folder)
    if not has_begun and (folder / RUN_FILE).exists():
        raise CheckpointError(
            f"{folder} holds a run of one process. Resume it without groups in sweep, "
            "or choose another output_dir."
        )
    if has_begun and not resume:
        raise CheckpointError(
            f"{folder} already holds a sweep: there is {SWEEP_LEDGER}. Resume it "
            "(resume=True, or --resume), or choose another output_dir."
        )
    if not has_begun:
        check_folder(folder, resume=resume)
    # The locks come first: what older workers still report must be in the ledger, or in
    # their checkpoints, before it is read.
    _await_workers(folder)
    for place in (folder, *(folder / GROUPS).glob("*")):
        clean_up(place)
    return Ledger(folder)


def check_same_sweep(state: SweepState, ledger: Ledger) -> None:
    """Refuses a ledger of another sweep, and keeps in a new one what must not change.

    Raises:
        CheckpointError: A configuration is missing, its settings differ, or the metric
            or the rungs of halving do.
    """
    found = state.configurations.values()
    now = {c.name: c.settings.model_dump(mode="json") for c in found}
    rules = state.decisions.rules
    if not ledger.records:
        record = {
            "kind": "sweep",
            "jobs": list(now.values()),
            "halving": halving_of(rules),
            "metric": state.decisions.metric.name,
        }
        ledger.begin(record)
        return
    check_same_rungs(
        rules, ledger.records[0].get("halving"), "the sweep that has begun"
    )
    metric, now_metric = ledger.records[0].get("metric"), state.decisions.metric.name
    if metric is not None and metric != now_metric:
        raise CheckpointError(
            f"metric is {metric} in the sweep that has begun, and {now_metric} now, so "
            "its evaluations cannot be compared. Restore it, or choose another "
            "output_dir."
        )
    for job in ledger.records[0]["jobs"]:
        name = str(job.get("name"))
        other = now.get(name)
        if other is None:
            raise CheckpointError(
                f"configuration {name!r} is in the sweep that has begun, and "
                "not in this one. Restore it, or choose another output_dir."
            )
        differ = [key for key in job if job[key] != other.get(key)]
        if differ:
            key = differ[0]
            raise CheckpointError(
                f"configuration {name!r}: {key} is {json.dumps(job[key])} in "
                f"the sweep that has begun, and {json.dumps(other.get(key))} now. "
                "Restore it, or choose another output_dir."
            )


def _await_workers(folder: pathlib.Path) -> None:
    """Waits until the workers of an earlier driver have ended.

    Raises:
        CheckpointError: One does not end.
    """
    end = time.monotonic() + _END_SECONDS
    for run in sorted((folder / GROUPS).glob("*")):
        while (owner := find_owner(run)) is not None:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{run} is still in use by {owner}, although the driver of the "
                    "sweep has ended. End that process, then continue with --resume."
                )
            time.sleep(0.1)


def _groups(config: RunConfig) -> list[Group]:
    """Returns the groups, each with the settings of its run."""
    assert config.sweep is not None
    meshes = config.sweep.meshes(config.mesh)
    num_slots = config.max_concurrent_jobs or math.ceil(len(config.jobs) / len(meshes))
    return [
        Group(num_slots=num_slots, run=_run(config, str(mesh), num_slots))
        for mesh in meshes
    ]


def _run(config: RunConfig, mesh: str, num_slots: int, **settings: Any) -> Any:
    """Returns the settings of a group's run as JSON values."""
    assert config.sweep is not None
    # The driver suggests, removes and merges.
    sweep = config.sweep.replace(
        groups=1, ray=None, search=None, keep_others=True, merge_best=False
    )
    run = config.replace(
        mesh=mesh, sweep=sweep, max_concurrent_jobs=num_slots, **settings
    )
    return run.model_dump(mode="json")


# ---- groups: auto --------------------------------------------------------------------


def _kept(plans: GroupPlans | None, config: RunConfig, ledger: Ledger) -> GroupPlans:
    """Returns the plan of the ledger; a sweep without one keeps it there.

    Args:
        plans: The plan of a sweep that begins; None: it has begun, maybe with groups
            that were given.
        config: The run.
        ledger: The ledger.

    Raises:
        ConfigError: The sweep cannot be planned.
    """
    begun = [record for record in ledger.records if record["kind"] == "plan"]
    if begun:
        return GroupPlans.of(begun[-1])
    plans = plans or plan_in_process(config)
    record = {"kind": "plan", **dataclasses.asdict(plans)}
    ledger.begin(record)
    logger.info(
        "groups: auto: %s; %.1f s predicted, if none ends early",
        "; ".join(
            f"{counted(len(one.names), 'configuration')} in "
            f"{counted(one.num_slots, 'slot')} of rank {one.slot_rank} on {one.mesh}"
            for one in plans.groups
        ),
        plans.seconds,
    )
    return plans


def _planned_group(config: RunConfig, plans: GroupPlans, one: GroupPlan) -> Group:
    """Returns a group that has the configurations which fit its slots."""
    rank_of = lambda job: plans.ranks.get(job.name, job.rank)
    jobs = [job for job in config.jobs if rank_of(job) <= one.slot_rank]
    run = _run(
        config,
        one.mesh,
        one.num_slots,
        jobs=tuple(jobs),
        slot_rank=one.slot_rank,
        microbatch_tokens=one.microbatch_tokens,
    )
    return Group(
        num_slots=one.num_slots,
        run=run,
        slot_rank=one.slot_rank,
        names=one.names,
    )


@contextlib.contextmanager
def _open_workers(config: RunConfig, meshes: Sequence[MeshSizes]) -> Iterator[Workers]:
    assert config.sweep is not None
    if config.sweep.ray is None:
        launcher = Launcher(COMMAND, divide(meshes), divide_cores(meshes))
        yield Workers(launcher)
        return
    from jaxlora.sweeps.engine.launch_ray import joined_cluster

    with joined_cluster(config.sweep.ray, COMMAND, meshes) as launcher:
        yield Workers(launcher)
