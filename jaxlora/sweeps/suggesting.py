"""Suggests further configurations of a sweep as others end."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import pydantic

from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.configuration_names import Namer
from jaxlora.config.job_settings import (
    axes_of,
    by_our_names,
    resolve_point,
    settings_key,
    values_at,
    with_settings,
)
from jaxlora.config.space import Axis, is_place
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
        self._axes: list[Axis] = []
        self._template: dict[str, Any] = {}
        if self._search is not None:
            check_installed()
            self._axes = axes_of(self._search.parameters, [])
            self._template = by_our_names(self._search.template)
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
        for name, place in suggested.items():
            if search is not None and not is_place(place, self._axes):
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
        settings = [job.settings for job in jobs]
        # Those that did not fit the run are not suggested again either.
        for name, place in self.points.items():
            if name not in names:
                values = self.settings_at(place)[1] | {"name": name}
                settings.append(LoraJob.model_validate(values))
        namer, there = Namer(), {_key(one) for one in settings}
        for one in settings:
            namer.reserve(one.name)
        found = suggestions(self._axes, search.seed, len(self.points), tried)
        for place in itertools.islice(found, _MOST_ASKED):
            varied, values = self.settings_at(place)
            prefix = self._template.get("name", "")
            name = namer.name(prefix, varied, self._axes)
            try:
                job = LoraJob.model_validate(values | {"name": name})
            except pydantic.ValidationError as error:
                logger.warning("%s", format_errors(error, "a suggestion of Optuna"))
                continue
            if _key(job) not in there:
                self.points[job.name] = place
                return job
        return None

    def settings_at(
        self, place: Mapping[str, float]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the settings that are varied at a place on the axes, and all."""
        point = values_at(self._axes, place)
        varied = resolve_point(point, self._axes, self._template)
        return varied, with_settings(self._template, varied)


def _key(job: LoraJob) -> str:
    return settings_key(job.model_dump(mode="json"))
