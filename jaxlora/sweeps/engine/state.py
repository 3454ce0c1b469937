"""The state of a sweep over several groups, which follows from its ledger alone."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxlora.config import LoraJob
from jaxlora.config.sweep_config import ExitRule, Metric
from jaxlora.run.folder import ADAPTERS
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_fields import STRICT, Count, JobName
from jaxlora.sweeps.decisions import Decisions
from jaxlora.sweeps.engine.group_plan import GroupPlan
from jaxlora.sweeps.engine.messages import JobFacts, Point, Verdict
from jaxlora.sweeps.rules import Curve, Decided, Stop

GROUPS = "groups"  # folder of the runs of all groups, in that of the sweep
Record = dict[str, Any]  # `kind`, and the parameters of `SweepState._on_<kind>`


_Stops = dict[JobName, Stop]


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Configuration:
    """A configuration of a sweep.

    Attributes:
        name: Its name.
        number: Its place in the order in which configurations are given.
        settings: Its settings.
        is_late: Whether it came after the sweep had begun, so that workers learn its
            settings when it is given.
        group: Group that trains it; None if none does.
        sources: Folders of runs that may have its state, the newest first.
        facts: What a worker has read; None before the first has.
        progress: What is known of its progress.
        held: Why the user has paused it; None if it may train.
        stop: Why the user wants it to end; None if it goes on.
        is_moving: Whether its group is to release it.
        left: The group that has released it last; None if none has.
        is_saved: Whether a checkpoint has its state.
        is_closed: Whether it has ended, and its files are on the disk.
        folder: Its PEFT folder, in the sweep's folder; None if there is none.
    """

    name: str
    number: int
    settings: LoraJob
    is_late: bool = False
    group: int | None = None
    sources: list[str] = dataclasses.field(default_factory=list)
    facts: JobFacts | None = None
    progress: JobProgress = dataclasses.field(default_factory=JobProgress)
    held: str | None = None
    stop: str | None = None
    is_moving: bool = False
    left: int | None = None
    is_saved: bool = False
    is_closed: bool = False
    folder: str | None = None

    @property
    def rank(self) -> int:
        """Largest LoRA rank of its modules, as far as that is known."""
        return self.settings.rank if self.facts is None else self.facts.rank

    @property
    def priority(self) -> int:
        """Priority of the configuration; higher ones train first."""
        return self.settings.priority

    @property
    def origin(self) -> str | None:
        """Names the configuration that it is a copy of; None if it starts anew."""
        found = self.settings.clone_of
        return None if found is None else found.job

    @property
    def first_step(self) -> int | None:
        """Steps of the other configuration when a copy starts; None if not known."""
        found = self.settings.clone_of
        return None if found is None else found.step

    @property
    def awaits_origin(self) -> bool:
        """Whether it is a copy whose state is only in the group that it starts in."""
        return self.origin is not None and not self.is_saved and not self.is_closed


class SweepState(Mapping[str, Curve]):
    """The configurations of a sweep, where each is, and what was decided.

    As a mapping, it has what the rules of early exit need to know of each.

    Attributes:
        configurations: The configurations, by name, in the order of their numbers.
        decisions: The evaluations and decisions.
        folders: Folder of each worker that may still live, by group.
        starts: Workers that were started for each group so far.
        places: The place on each axis of the search of the configurations that it has
            suggested, by name.
    """

    def __init__(
        self,
        jobs: Iterable[LoraJob],
        rules: Sequence[ExitRule],
        metric: Metric | None = None,
    ):
        """Makes the state of a sweep that has not begun."""
        self.configurations: dict[str, Configuration] = {}
        self.decisions = Decisions(rules, metric)
        self.places: dict[str, dict[str, float]] = {}
        self.folders: dict[int, str] = {}
        self.starts: dict[int, int] = {}
        self._queue: list[Configuration] | None = None
        self._held_by: dict[int, dict[str, Configuration]] = {}
        self._copies: list[Configuration] = []
        for job in jobs:
            self._add(job, is_late=False)

    # ---- records -------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Follows a record, which the ledger has or is about to get.

        Raises:
            ValueError: It is no record, or contradicts those before.
        """
        values = check_record(record)
        getattr(self, f"_on_{record['kind']}")(**values)

    def _find(self, name: str) -> Configuration:
        if name not in self.configurations:
            raise ValueError(f"there is no configuration {name!r}.")
        return self.configurations[name]

    def _add(self, settings: LoraJob, *, is_late: bool) -> None:
        name, number = settings.name, len(self.configurations)
        self.configurations[name] = Configuration(
            name=name, number=number, settings=settings, is_late=is_late
        )
        if self.configurations[name].origin is not None:
            self._copies.append(self.configurations[name])
        self._queue = None

    def _on_sweep(
        self,
        jobs: list[dict[str, Any]],
        halving: dict[Literal["eta", "first"], float] | None = None,
        metric: str | None = None,
    ) -> None:
        """Does nothing: the configurations at the start are known already."""

    def _on_plan(
        self,
        groups: Annotated[list[GroupPlan], Field(min_length=1)],
        ranks: dict[JobName, Count],
        seconds: float,
    ) -> None:
        """Does nothing: the driver has got the groups of the plan."""

    def _on_begin(self) -> None:
        for group in list(self.folders):
            self._on_lost(group=group, reason="")

    def _on_job(self, settings: LoraJob, place: dict[str, float] | None) -> None:
        if settings.clone_of is not None:
            self._find(settings.clone_of.job)
        if place is not None:
            self.places[settings.name] = place
        if settings.name not in self.configurations:  # else, the run file has it now
            self._add(settings, is_late=True)

    def _on_facts(self, jobs: list[JobFacts]) -> None:
        for facts in jobs:
            found = self._find(facts.name)
            found.facts = facts
            if facts.clone_step is not None:
                if (origin := found.settings.clone_of) is None:
                    raise ValueError(f"{found.name} is no copy.")
                start = origin.model_copy(update={"step": facts.clone_step})
                found.settings = found.settings.model_copy(update={"clone_of": start})

    def _on_start(self, group: Count, folder: str) -> None:
        if folder != self.next_folder(group):
            raise ValueError(f"folder must be {self.next_folder(group)}.")
        self.folders[group] = folder
        self.starts[group] = self.starts.get(group, 0) + 1

    def _on_lost(self, group: Count, reason: str) -> None:
        self.folders.pop(group, None)
        self._queue = None
        for found in self._held_by.pop(group, {}).values():
            found.group, found.is_moving = None, False
            if found.origin is not None and found.first_step is None:
                found.sources = []  # the copy will start at another step

    def _on_given(self, name: JobName, group: Count) -> None:
        found, folder = self._find(name), self.folders.get(group)
        if folder is None or found.group is not None:
            raise ValueError(f"group {group} cannot get {name}.")
        found.group = group
        if self._queue is not None and found in self._queue:
            self._queue.remove(found)
        self._held_by.setdefault(group, {})[name] = found
        found.sources = [folder, *(old for old in found.sources if old != folder)]

    def _on_moving(self, name: JobName) -> None:
        self._find(name).is_moving = True

    def _on_released(self, name: JobName) -> None:
        found = self._find(name)
        found.left = found.group
        self._leave(found)
        self._queue = None

    def _on_saved(self, name: JobName, folder: str) -> None:
        found = self._find(name)
        if found.group is None or folder != self.folders[found.group]:
            raise ValueError(f"folder must be that of the group which has {name}.")
        found.sources, found.is_saved = [folder], True

    def _on_eval(
        self,
        points: list[Point],
        cutoffs: list[float],
        stops: _Stops,
    ) -> None:
        for name, step, loss, value in points:
            self._find(name)
            self.decisions.keep(name, step, loss, value)
        self._on_decided(cutoffs=cutoffs, stops=stops)

    def _on_decided(self, cutoffs: list[float], stops: _Stops) -> None:
        for name in stops:
            self._find(name)
        self.decisions.repeat(Decided(cutoffs=tuple(cutoffs), stops=stops))
        if cutoffs or stops:
            self._queue = None

    def _on_ended(
        self, name: JobName, progress: JobProgress, folder: str | None
    ) -> None:
        found = self._find(name)
        if folder not in (None, f"{ADAPTERS}/{name}"):
            raise ValueError(f"folder must be {ADAPTERS}/{name}.")
        if not progress.is_over or not 0 <= progress.step < 2**53:
            raise ValueError(f"{name} is {progress.status} at step {progress.step}.")
        found.progress, found.folder = progress, folder
        found.is_closed, found.sources = True, []
        self._leave(found)
        if self._copies:
            self._queue = None  # those of this one may be free now

    def _on_held(self, name: JobName, reason: str | None) -> None:
        self._find(name).held = reason
        self._queue = None

    def _on_asked_to_stop(self, name: JobName, reason: str) -> None:
        self._find(name).stop = reason
        self._queue = None

    def _leave(self, found: Configuration) -> None:
        if found.group is not None:
            del self._held_by[found.group][found.name]
        found.group, found.is_moving = None, False

    # ---- decisions: these make records, which must not be applied ------------------

    def note(self, points: Sequence[Point]) -> Record:
        """Decides after evaluations; returns the record of both."""
        found = self.decisions.note(points, self)
        if found.cutoffs or found.stops:
            self._queue = None
        return {"kind": "eval", "points": list(points), **_values(found)}

    def review(self) -> Record | None:
        """Decides what follows from ends and pauses; returns the record, if any."""
        found = self.decisions.review(self)
        if not (found.cutoffs or found.stops):
            return None
        self._queue = None
        return {"kind": "decided", **_values(found)}

    def verdict(self, name: str) -> Verdict | None:
        """Returns the decision about a configuration; None if it was not evaluated."""
        points = self.decisions.points.get(name)
        if not points:
            return None
        step, stop = points[-1][0], self.decisions.stops.get(name)
        waits = self.waits(self.configurations[name])
        return Verdict(name=name, step=step, waits=waits, stop=stop)

    # ---- what the rules see --------------------------------------------------------

    def __getitem__(self, name: str) -> Curve:
        found = self.configurations[name]
        points = self.decisions.points.get(name)
        return Curve(
            num_steps=1 if found.facts is None else found.facts.num_steps,
            # Not `progress.step`, which may come before the evaluation at that step.
            step=points[-1][0] if points else self._first_step(found),
            is_over=found.is_closed,
            is_held=found.held is not None,
            has_failed=found.is_closed and found.progress.status == "failed",
        )

    def __iter__(self) -> Iterator[str]:
        found = self.configurations.values()
        return (c.name for c in found if c.facts is None or c.facts.is_evaluated)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _first_step(self, found: Configuration) -> int:
        """Returns the step before which no rung waits for a configuration."""
        if found.origin is None:
            return 0
        return found.first_step or self[found.origin].step

    def next_folder(self, group: int) -> str:
        """Returns the folder of the run of a group's next worker, in the sweep's."""
        return f"{GROUPS}/{group}-{self.starts.get(group, 0) + 1}"

    # ---- which group may train what ------------------------------------------------

    def waits(self, found: Configuration) -> bool:
        """Whether a configuration waits at a rung until the others have come as far."""
        points = self.decisions.points.get(found.name)
        if not points or found.facts is None:
            return False
        step = points[-1][0]
        return self.decisions.waits(found.name, step, found.facts.num_steps)

    def queue(self) -> list[Configuration]:
        """Returns the configurations that a group may take, the next one first."""
        if self._queue is None:
            self._queue = [
                found
                for found in self.configurations.values()
                if found.group is None
                and not found.is_closed
                and self._may_train(found)
                and not self._follows(found)
            ]
            self._queue.sort(key=lambda found: (-found.priority, found.number))
        return self._queue

    def _may_train(self, found: Configuration) -> bool:
        if found.stop is not None:
            return True  # it is given to be evaluated and exported
        return found.held is None and not self.waits(found)

    def copies(self) -> list[tuple[Configuration, int]]:
        """Returns copies to give, each with the group that it starts in."""
        waiting = [c for c in self._copies if c.group is None and self._follows(c)]
        groups = {c.name: self.configurations[c.origin or ""].group for c in waiting}
        return [
            (found, group)
            for found in waiting
            if (group := groups[found.name]) is not None and found.held is None
        ]

    def _follows(self, found: Configuration) -> bool:
        """Whether a copy can only start in the group of the one that it copies."""
        if found.origin is None or not found.awaits_origin or found.stop is not None:
            return False
        return not self.configurations[found.origin].is_closed

    def may_leave(self, found: Configuration) -> bool:
        """Whether no copy needs a configuration in its group, and it is none itself."""
        copied = {c.origin for c in self._copies if c.awaits_origin}
        return found.name not in copied and not found.awaits_origin

    def of_group(self, group: int) -> list[Configuration]:
        """Returns the configurations that a group has, in their order."""
        found = self._held_by.get(group, {}).values()
        return sorted(found, key=lambda c: c.number)

    def num_active(self, group: int) -> int:
        """Returns how many configurations of a group train or may train now."""
        found = self._held_by.get(group, {}).values()
        return sum(self._may_train(c) and not c.is_moving for c in found)

    def open(self) -> list[Configuration]:
        """Returns the configurations that have not ended."""
        return [c for c in self.configurations.values() if not c.is_closed]

    def is_over(self) -> bool:
        """Whether nothing is left to train, but what the user has paused."""
        return all(map(self._rests, self.open()))

    def _rests(self, found: Configuration) -> bool:
        """Whether a configuration, or the one that it copies, waits for the user."""
        if found.stop is not None:
            return False
        if found.held is not None:
            return True
        if found.origin is None or not self._follows(found):
            return False
        origin = self.configurations[found.origin]
        return origin.group is None and self._rests(origin)

    def unused_folders(self, folders: Iterable[str]) -> list[str]:
        """Returns those of the folders whose checkpoints nobody needs any more."""
        used = set(self.folders.values())
        used.update(source for found in self.open() for source in found.sources)
        return [folder for folder in folders if folder not in used]


def _model(follow: Callable[..., None]) -> type[pydantic.BaseModel]:
    """Returns the model of the records that a method of `SweepState` follows."""
    _, *parameters = inspect.signature(follow).parameters.values()
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is p.empty else p.default)
        for p in parameters
    }
    return pydantic.create_model(follow.__name__, __config__=STRICT, **fields)


_MODELS = {
    name.removeprefix("_on_"): _model(follow)
    for name, follow in vars(SweepState).items()
    if name.startswith("_on_")
}


def check_record(record: Record) -> dict[str, Any]:
    """Returns the values of a record, all of whose fields have the right types.

    Raises:
        ValueError: They do not, or there is no such kind of record.
    """
    values = dict(record)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in _MODELS:
        raise ValueError(f"there is no kind of record {kind!r:.80}")
    found = _MODELS[kind].model_validate_json(json.dumps(values))
    return {name: getattr(found, name) for name in values}


def _values(decided: Decided) -> dict[str, Any]:
    return {"cutoffs": list(decided.cutoffs), "stops": dict(decided.stops)}
