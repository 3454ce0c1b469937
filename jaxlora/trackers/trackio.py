"""Reports to Trackio: a run for each job, in a project that the environment names.

TRACKIO_PROJECT names the project, and TRACKIO_DIR the local folder.
"""

import os
from typing import Any

from jaxlora.trackers.table import Tracker


class Trackio(Tracker):
    """Sends each job's metrics and texts to a run of Trackio.

    A resumed job continues its run.
    """

    def _open(self, job: str, settings: dict[str, Any], step: int) -> Any:
        import trackio

        return trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "jaxlora"),
            name=f"{self._folder.name}/{job}",
            group=self._folder.name,
            resume="allow",
            config=settings,
            embed=False,
        )

    def _send(self, run: Any, values: dict[str, Any], step: int) -> None:
        run.log(values, step=step)

    def _table(self, row: dict[str, Any]) -> Any:
        import trackio

        return trackio.Table(data=[row])

    def _close(self, run: Any) -> None:
        run.finish()
