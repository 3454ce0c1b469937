"""Suggests further configurations of a sweep as others end, with Optuna's TPE.

Optuna keeps nothing: for each suggestion, a fresh study in memory gets the results, and
a seed of its own. So a run that is resumed suggests what it would have suggested.
"""

import dataclasses
import importlib.util
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

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
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.problems import format_errors
from jaxlora.run.job_progress import JobProgress

logger = logging.getLogger(__name__)

_MOST_ASKED = 30  # suggestions for one configuration, until the space counts as empty
_STARTUP = 5  # results from which TPE is used; before, it draws at random


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A configuration that was tried, or is being tried.

    Attributes:
        place: Its place on each axis, by name.
        state: `running`; `complete`; or `pruned`: it ended early.
        step: Optimizer steps done.
        cost: What is lower for better ones; None: it is not known.
    """

    place: Mapping[str, float]
    state: Literal["running", "complete", "pruned"]
    step: int = 0
    cost: float | None = None


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

    def next(
        self, jobs: Sequence[tuple[LoraJob, JobProgress]], num_slots: int
    ) -> LoraJob | None:
        """Returns a configuration to add now; None if none is due."""
        search = self._search
        if search is None or self._is_exhausted or not self.is_open:
            return None
        mine = {job.name: p for job, p in jobs if job.name in self.points}
        if sum(not progress.is_over for progress in mine.values()) >= num_slots:
            return None
        tried = [self._tried(self.points[n], progress) for n, progress in mine.items()]
        found = self._suggest(search, [job for job, _ in jobs], tried)
        if found is None:
            self._is_exhausted = True
            logger.info("sweep: Optuna finds no other configuration in this space")
        return found

    def _tried(self, place: Mapping[str, float], progress: JobProgress) -> Tried:
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
        self, search: Search, jobs: Sequence[LoraJob], tried: Sequence[Tried]
    ) -> LoraJob | None:
        settings, names = list(jobs), {job.name for job in jobs}
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


def check_installed() -> None:
    """Checks that Optuna is installed.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "sweep.method: optuna needs the package optuna, which is not installed. "
            "Run: pip install 'jaxlora[optuna]', or set `method: random`."
        )


def suggestions(
    axes: Sequence[Axis], seed: int, number: int, tried: Sequence[Tried]
) -> Iterator[dict[str, float]]:
    """Yields places on the axes, the most promising first, without an end.

    The number is that of the configurations before this suggestion.
    """
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
    )
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, BaseDistribution] = {
        axis.name: FloatDistribution(0.0, 1.0)
        if axis.space.values is None
        else CategoricalDistribution(list(range(len(axis.space.values))))
        for axis in axes
    }
    sampler = optuna.samplers.TPESampler(
        seed=1_000_003 * seed + number, n_startup_trials=_STARTUP, constant_liar=True
    )
    study = optuna.create_study(sampler=sampler)
    for one in tried:
        values = {}
        if one.state == "pruned" and one.cost is not None:
            values = {one.step: one.cost}
        place = {
            axis.name: one.place[axis.name]
            if axis.space.values is None
            else int(one.place[axis.name])
            for axis in axes
        }
        trial = create_trial(
            params=place,
            distributions=space,
            state=TrialState[one.state.upper()],
            value=one.cost if one.state == "complete" else None,
            intermediate_values=values,
        )
        study.add_trial(trial)
    while True:
        yield dict(study.ask(space).params)
