"""The jobs of a group that have ended: reported when their weights are on the disk."""

import dataclasses
import pathlib

from jaxlora.run.folder import ADAPTERS
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.link import Link
from jaxlora.train.job_state import JobState


class GroupEnds:
    """Reports the ends of jobs to the driver."""

    def __init__(self, link: Link):
        """Makes the object; no job has ended.

        Args:
            link: Sends to the driver.
        """
        self._link = link
        self._ended: dict[str, JobProgress] = {}
        self._exported: dict[str, int] = {}  # steps of the adapter on the disk
        self._came_with: dict[str, int | None] = {}  # the step of their best weights
        self._sources: dict[str, pathlib.Path] = {}  # the run that they come from

    def __contains__(self, name: object) -> bool:
        return name in self._ended

    def begin(
        self, name: str, best_step: int | None, source: pathlib.Path | None = None
    ) -> None:
        """Notes a job that begins, or goes on.

        Args:
            name: The job.
            best_step: The step of its best weights so far; None: there are none.
            source: Folder of the run that it comes from; None: it is as before.
        """
        self._came_with[name] = best_step
        if source is not None:
            self._sources[name] = source

    def find(self, name: str, progress: JobProgress, source: pathlib.Path) -> None:
        """Reports a job that has ended in another run, whose folder is `source`."""
        self._ended[name] = progress
        self._send(name, source / ADAPTERS / name)

    def note_end(self, job: JobState, progress: JobProgress, run: pathlib.Path) -> None:
        """Notes a job that has ended in this run, whose folder is `run`."""
        self._ended[job.name] = progress
        self._report(job, run)

    def note_export(self, job: JobState, step: int, run: pathlib.Path) -> None:
        """Notes an adapter on the disk."""
        self._exported[job.name] = step
        if job.name in self._ended:
            self._report(job, run)

    def _report(self, job: JobState, run: pathlib.Path) -> None:
        """Reports an end, if nothing is still to be written."""
        name, progress = job.name, self._ended[job.name]
        step = progress.exported_step(keep_best=job.settings.keep_best)
        folder = run / ADAPTERS / name
        if step is None:
            self._send(name, None)
        elif self._exported.get(name, -1) >= step:
            self._send(name, folder)
        elif job.settings.keep_best and step == self._came_with[name]:
            # Nothing is written here, but a copy of those weights may be.
            source = self._sources.get(name)
            is_here = source is None or folder.is_dir()
            self._send(name, folder if is_here else source / ADAPTERS / name)

    def _send(self, name: str, folder: pathlib.Path | None) -> None:
        progress = dataclasses.asdict(self._ended[name])
        text = None if folder is None else str(folder.absolute())
        self._link.send(m.Ended(name=name, progress=progress, folder=text))
