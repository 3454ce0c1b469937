"""Suggests further configurations of a sweep as others end."""

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import pydantic

from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.job_settings import axes_of
from jaxlora.config.search import SuggestedSettings
from jaxlora.config.space import is_place
from jaxlora.config.sweep_config import Metric, Search
from jaxlora.errors import CheckpointError
from jaxlora.problems import format_errors
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.optuna_search import Tried, check_installed, suggestions

logger = logging.getLogger(__name__)

_MOST_ASKED = 30  # suggestions for one configuration, until the space counts as empty


@runtime_checkable
class Candidate(Protocol):
    """A configuration as a search sees it: a job of a run, or of a group's run."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> LoraJob: ...

    @property
    def progress(self) -> JobProgress: ...


class Suggestions:
    """The search of a sweep that goes on while the run trains.

    A suggestion is made when a configuration has ended, from what all have shown so
    far. It depends on nothing else, so a resumed run makes the same ones.

    Attributes:
        points: The place on each axis of the configurations that were drawn or
            suggested, by name.
    """

    def __init__(self, config: RunConfig):
        """Makes the object.

        Args:
            config: The run.

        Raises:
            ConfigError: Optuna is not installed, and the run needs it.
        """
        sweep = config.sweep
        self._search: Search | None = None if sweep is None else sweep.search
        self._metric = Metric() if sweep is None else sweep.metric
        self.points: dict[str, dict[str, float]] = {}
        self._is_exhausted = False
        if self._search is not None:
            check_installed()
        self.restore({})

    @property
    def is_open(self) -> bool:
        """Whether further configurations may follow, like those that there were."""
        return self._search is not None and len(self.points) < self._search.count

    def restore(self, suggested: dict[str, dict[str, float]]) -> None:
        """Takes over what was suggested before; the drawn ones come first.

        Raises:
            CheckpointError: A place is not on the axes of the search.
        """
        search = self._search
        axes = [] if search is None else axes_of(search.parameters, LoraJob, [])
        for name, place in suggested.items():
            if search is not None and not is_place(place, axes):
                raise CheckpointError(
                    f"{name} was suggested at {place}, which is not a point in the "
                    "space of the sweep's parameters. Restore these, or choose another "
                    "output_dir."
                )
        drawn = {} if search is None else search.points
        self.points, self._is_exhausted = {**drawn, **suggested}, False

    def saved(self) -> dict[str, dict[str, float]]:
        """Returns the points of the configurations that were suggested."""
        drawn = {} if self._search is None else self._search.points
        return {name: p for name, p in self.points.items() if name not in drawn}

    def next(self, jobs: Sequence[Candidate], num_slots: int) -> LoraJob | None:
        """Returns a configuration to add now; None if none is due.

        Args:
            jobs: All jobs of the run.
            num_slots: Number of jobs that may run at the same time.
        """
        search = self._search
        if search is None or self._is_exhausted or not self.is_open:
            return None
        mine = [job for job in jobs if job.name in self.points]
        if sum(not job.progress.is_over for job in mine) >= num_slots:
            return None
        found = self._suggest(search, jobs, [self._tried(job) for job in mine])
        if found is None:
            self._is_exhausted = True
            logger.info("sweep: Optuna finds no other configuration in this space")
        return found

    def _tried(self, job: Candidate) -> Tried:
        progress, place = job.progress, self.points[job.name]
        best = progress.best_eval if self._metric.is_loss else progress.best_metric
        if not progress.is_over:
            return Tried(place=place, state="running")
        cost = None if best is None else self._metric.cost(best)
        is_whole = progress.status == "finished" or (
            progress.status == "stopped early" and progress.stopped_by is None
        )
        state = "complete" if is_whole and cost is not None else "pruned"
        return Tried(place=place, state=state, step=progress.step, cost=cost)

    def _suggest(
        self, search: Search, jobs: Sequence[Candidate], tried: Sequence[Tried]
    ) -> LoraJob | None:
        names = {job.name for job in jobs}
        left_out = {n: place for n, place in self.points.items() if n not in names}
        settings = [job.settings for job in jobs]
        made = SuggestedSettings(search, LoraJob, settings, left_out)
        number = len(self.points)
        found = suggestions(made.axes, search.seed, number, tried)
        for _ in range(_MOST_ASKED):
            place = next(found)
            try:
                job = LoraJob.model_validate(made.at(place))
            except pydantic.ValidationError as error:
                logger.warning("%s", format_errors(error, "a suggestion of Optuna"))
                continue
            if made.is_there(job):
                continue
            self.points[job.name] = place
            return job
        return None
