"""A search that goes on while the run trains: its first draws, and what follows."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.config.configuration_names import Namer
from jaxlora.config.job_settings import (
    axes_of,
    our_name,
    resolve_point,
    setting_of,
    settings_key,
    values_at,
    with_settings,
)
from jaxlora.config.space import Axis
from jaxlora.config.strict import StrictModel
from jaxlora.config.sweep_config import Search, Sweep

_LEAST_INITIAL = 10
ONE_JOB = (
    "`method: optuna` searches the settings of one job, whose values are all in "
    "parameters. Give one job without lists, or set `method: random`."
)


def drawn_first(sweep: Sweep, values: Mapping[str, Any]) -> Sweep:
    """Returns a sweep with the number of configurations that are drawn at the start.

    Args:
        sweep: The sweep.
        values: The settings of the run, unchecked.
    """
    if sweep.method != "optuna" or sweep.count is None:
        return sweep
    initial, slots = sweep.initial, values.get("max_concurrent_jobs")
    if initial is None:
        initial = max(_LEAST_INITIAL, slots if type(slots) is int else 0)
    return sweep.replace(count=min(sweep.count, initial))


def search_of(
    sweep: Sweep, job: Any, points: Mapping[str, dict[str, float]]
) -> dict[str, Any]:
    """Returns the settings of a sweep whose further configurations are suggested.

    Args:
        sweep: The sweep.
        job: The job that it varies, unchecked.
        points: The place on each axis of the configurations that were drawn, by name.
    """
    search = {
        "template": _plain(job),
        "parameters": sweep.parameters,
        "count": sweep.count,
        "seed": sweep.seed,
        "points": dict(points),
    }
    is_chosen = "early_exit" in sweep.model_fields_set
    return {"search": search} | ({} if is_chosen else {"early_exit": "asha"})


def _plain(job: Any) -> dict[str, Any]:
    """Returns the settings of a job as JSON values."""
    if isinstance(job, StrictModel):
        return job.model_dump(mode="json", exclude_unset=True)
    is_part = lambda value: isinstance(value, StrictModel)
    return {k: _plain(v) if is_part(v) else v for k, v in job.items()}


def slots_of(
    values: Mapping[str, Any],
    jobs: Sequence[Mapping[str, Any]],
    axes: Sequence[Axis],
    kind: type[StrictModel],
) -> dict[str, Any]:
    """Returns the settings of slots that hold whatever may be suggested.

    Args:
        values: The settings of the run, unchecked.
        jobs: The configurations that were drawn.
        axes: The axes of the search.
        kind: The class of a job.
    """
    out: dict[str, Any] = {}
    for name, setting in (("rank", "slot_rank"), ("dropout", "slot_dropout")):
        if values.get(setting) is not None:
            continue
        found = [setting_of(job, name, kind) for job in jobs]
        for axis in axes:
            if axis.name == name and axis.space.times is None:
                found += axis.space.values or [axis.range[1]]
            elif axis.name.startswith("_"):
                mappings: Any = axis.space.values or ()
                found += [
                    v
                    for one in mappings
                    for k, v in one.items()
                    if our_name(k, kind)[0] == name
                ]
        most = max((n for n in found if isinstance(n, int | float)), default=0)
        out[setting] = most > 0 if name == "dropout" else most
    return out


class SuggestedSettings:
    """Makes the settings of configurations that are suggested.

    Attributes:
        axes: The axes of the search.
    """

    def __init__(
        self,
        search: Search,
        kind: type[StrictModel],
        jobs: Sequence[StrictModel],
        left_out: Mapping[str, Mapping[str, float]] | None = None,
    ):
        """Makes the object.

        Args:
            search: The search.
            kind: The class of a job.
            jobs: The jobs that there are, none of which is made again.
            left_out: The place on each axis of those that were suggested and did not
                fit the run, by name. None of them is made again either.
        """
        self.axes = axes_of(search.parameters, kind, [])
        self._search, self._kind, self._namer = search, kind, Namer()
        others = [
            kind.model_validate(self._settings_at(place)[1] | {"name": name})
            for name, place in (left_out or {}).items()
        ]
        self._there = {_key(job) for job in (*jobs, *others)}
        for job in (*jobs, *others):
            self._namer.reserve(getattr(job, "name", ""))

    def at(self, places: Mapping[str, float]) -> dict[str, Any]:
        """Returns the settings of the configuration at places on the axes."""
        settings, made = self._settings_at(places)
        prefix = self._search.template.get("name", "")
        return made | {"name": self._namer.name(prefix, settings, self.axes)}

    def _settings_at(
        self, places: Mapping[str, float]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the settings that are varied, and all but the name."""
        template, kind = self._search.template, self._kind
        point = values_at(self.axes, places)
        settings = resolve_point(point, self.axes, template, kind)
        return settings, with_settings(template, settings, kind)

    def is_there(self, job: StrictModel) -> bool:
        """Whether there is a job of equal settings."""
        return _key(job) in self._there


def _key(job: StrictModel) -> str:
    return settings_key(job.model_dump(mode="json"))
