"""Plans a run that goes on: on the replicas that it has had, or on others.

Replicas that `replicas: auto` chose when a job had ended need not hold its samples. If
the run goes on from a checkpoint in which the job has not ended, or with a job that
joins it, they may not hold what is left. Replicas are then chosen anew.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.distributed import processes
from jaxlora.errors import ConfigError
from jaxlora.run.folder import CHECKPOINTS, BegunRun
from jaxlora.train.plan.auto_mesh.machine import Machine
from jaxlora.train.plan.planned_model import PlannedModel
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.resolve import resolve
from jaxlora.train.plan.run_plan import RunPlan
from jaxlora.train.saved.read_checkpoint import newest_checkpoint, read_newest

# The record of a run has chosen values of these settings, because of `replicas: auto`.
_CHOSEN = ("replicas", "mesh", "microbatch_tokens", "remat", "slot_rank")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Resumed:
    """Where a run goes on; a new run has the defaults.

    Attributes:
        ended: Jobs that have ended and that the run's replicas need not hold.
        over: All jobs that have ended.
        anew: The run with `replicas: auto`; None: its replicas are not recorded, or the
            user gave them.
    """

    ended: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    anew: RunConfig | None = None

    @staticmethod
    def of(asked: RunConfig, begun: BegunRun) -> "Resumed":
        """Reads the newest checkpoint of a run.

        Args:
            asked: The run as the user gave it.
            begun: The run as it began, if it has begun.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        if not begun.has_begun:
            return NEW_RUN
        checkpoints = pathlib.Path(asked.output_dir) / CHECKPOINTS
        over = processes.from_first(lambda: _over(checkpoints))
        anew = None
        if asked.replicas == "auto" and begun.config.replicas != "auto":
            chosen = {name: getattr(asked, name) for name in _CHOSEN}
            anew = begun.config.replace(**chosen)
        ended = tuple(name for name in begun.ended if name in over)
        return Resumed(ended=ended, over=tuple(over), anew=anew)

    def plan(
        self,
        config: RunConfig,
        model: PlannedModel,
        jobs: Sequence[PreparedJob],
        machine: Machine,
        on_accepted: Callable[[], None],
    ) -> RunPlan:
        """Plans the run on its replicas, or on others if they do not hold its jobs.

        Args:
            config: The run as it began.
            model: The base model.
            jobs: All jobs of the run.
            machine: The machine.
            on_accepted: See `resolve`.

        Raises:
            ConfigError: See `resolve`.
        """
        args = model, jobs, machine
        try:
            return resolve(config, *args, on_accepted, self.ended)
        except ConfigError as error:
            # If all jobs have ended, there is nothing to choose replicas for.
            if self.anew is None or len(self.over) == len(jobs):
                raise
            why = str(error)
        plan = resolve(self.anew, *args, ended=self.over)
        text = f"replicas: auto: chosen anew, as those so far cannot go on: {why}"
        return dataclasses.replace(plan, notes=(Note(text), *plan.notes))


NEW_RUN = Resumed()


def _over(checkpoints: pathlib.Path) -> list[str]:
    """Returns the jobs that have ended by the newest checkpoint, if there is one."""
    if newest_checkpoint(checkpoints) is None:
        return []
    progress = read_newest(checkpoints).run.progress
    return [name for name, one in progress.items() if one.is_over]
