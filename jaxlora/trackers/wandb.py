"""Reports to Weights & Biases: a run for each job, in a group for the whole run.

The environment variables of W&B choose the rest: WANDB_PROJECT, WANDB_ENTITY,
WANDB_MODE=offline.
"""

import hashlib
import os
from typing import Any

from jaxlora.trackers.table import Tracker


class Wandb(Tracker):
    """Sends each job's metrics and texts to a run of W&B.

    A resumed job continues its run, as the run's id follows from the folder's path and
    the job's name.
    """

    def _open(self, job: str, settings: dict[str, Any], step: int) -> Any:
        import wandb

        identity = f"{self._folder.absolute()}/{job}".encode()
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxlora"),
            group=self._folder.name,
            name=job,
            id=hashlib.sha256(identity).hexdigest()[:16],
            resume="allow",
            reinit="create_new",  # the jobs' runs are open at the same time
            config=settings,
            dir=str(self._folder),
        )
        # Steps that are done again after a kill are sent again, which W&B accepts for
        # a metric but not for its own count of steps.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _send(self, run: Any, values: dict[str, Any], step: int) -> None:
        run.log({**values, "step": step})

    def _table(self, row: dict[str, Any]) -> Any:
        import wandb

        return wandb.Table(columns=list(row), data=[list(row.values())])

    def _close(self, run: Any) -> None:
        run.finish()
