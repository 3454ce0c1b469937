"""The state that a run saves on the disk, and its validation when it is read."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
import xxhash

from jaxlora.adapters.adapter import Adapter
from jaxlora.common.json_file import check_regular_file
from jaxlora.config import LoraJob
from jaxlora.errors import CheckpointError
from jaxlora.problems import format_errors
from jaxlora.run.identity import RunIdentity
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_fields import (
    STRICT,
    Count,
    IsoTime,
    JobName,
    OneLine,
    type_adapter,
)
from jaxlora.scheduler.lanes import Tick
from jaxlora.scheduler.stream.state import StreamState

FORMAT = 11  # of run.json and of a checkpoint's metadata


# Requests of the user that are in force: the jobs to stop, and those to keep out of the
# slots until they are resumed, with the reasons.
SavedRequests = dict[Literal["stopping", "pausing"], dict[JobName, str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedStream:
    """The ticks that a resumed run goes on with, so that it ends in the same bits.

    Attributes:
        rules: Describes the rules of the ticks and the jobs in the slots. The ticks are
            only of use if they are the same.
        repeated: Ticks with samples of batches that are not complete, which run again;
            the rows of each microbatch of a tick; and the slots whose samples do not
            run, as their job has left.
        state: State of the stream before the planned ticks.
        planned: Ticks that were planned and have not run.
        shapes_from: First tick that may have a shape below the capacity.
        leaving: Slots with rows of a job that has left in ticks in flight, and the tick
            from which each is free.
        at_border: Slots whose jobs are between two of their batches here.
    """

    __pydantic_config__ = STRICT

    rules: str
    repeated: tuple[tuple[Tick, int, frozenset[int]], ...]
    state: StreamState
    planned: tuple[Tick, ...]
    shapes_from: int
    leaving: dict[int, int]
    at_border: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedSweep:
    """The evaluations and decisions of a sweep, which a resumed run takes over.

    Attributes:
        points: (steps done, held-out loss) of each evaluation, by job.
        cutoffs: Highest loss that went on at each rung of halving that is decided.
        metrics: (steps done, value of the metric of answers), by job.
        stops: The rule and the reason of each job that ends, or has ended, early.
        halving: `eta` and `first` of the rule of halving; None: there is none.
    """

    __pydantic_config__ = STRICT

    points: dict[JobName, list[tuple[Count, float]]]
    cutoffs: list[float]
    stops: dict[JobName, tuple[str, str]]
    metrics: dict[JobName, list[tuple[Count, float]]]
    halving: dict[str, float] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """The metadata of a checkpoint: what changes while a run trains.

    Attributes:
        progress: Each job's progress, by name.
        adapters: The adapter of each job that has begun and not ended, by name; its
            values are in the file of tensors.
        optimizers: Names of the optimizers of these jobs, by name.
        stream: The microbatches that follow.
        sweep: Decisions of the run's sweep; None if it has none.
        suggested: The place on each axis of configurations that were suggested.
        checksums: XXH3 of each array in the file of tensors, by name.
    """

    __pydantic_config__ = STRICT

    progress: dict[JobName, JobProgress]
    adapters: dict[JobName, Adapter]
    optimizers: dict[JobName, str]
    stream: SavedStream
    sweep: SavedSweep | None = None
    suggested: dict[JobName, dict[str, float]] = dataclasses.field(default_factory=dict)
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Checks that the fields are consistent; see `read_sealed`."""
        slots = [p.slot for p in self.progress.values() if p.slot is not None]
        if len(set(slots)) < len(slots) or min(slots, default=0) < 0:
            raise ValueError(f"slots {slots} are not different ones.")
        for name, job in self.progress.items():
            has_slot = job.slot is not None
            if not 0 <= job.step < 2**53 or has_slot != (job.status == "running"):
                raise ValueError(
                    f"job {name} is {job.status} at step {job.step} in slot {job.slot}."
                )
        begun = [n for n, job in self.progress.items() if job.has_state]
        if not {*begun} == self.adapters.keys() == self.optimizers.keys():
            raise ValueError(
                f"adapters has the jobs {sorted(self.adapters)}, and those that have "
                f"begun and not ended are {sorted(begun)}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The contents of `run.json`, which identifies the run from its start on.

    Attributes:
        started: Start time in ISO format, because chat templates may print the date.
        identity: What must not change, with the jobs that were added since.
        config: The settings of the run but its jobs, as they were resolved.
        base_model: Folder or hub id of the base.
        linear_names: Names of the base's linears.
        model_type: `model_type` of the base; None: the run began before it was kept.
        base_revision: Commit of a base from the hub; None for a folder.
        requests: Requests to stop and to pause jobs, which outlive a kill before the
            next checkpoint.
        added: Jobs that joined while the run trained. A run that resumes has them, even
            if they are not in its run file.
        suggested: Those of `added` that the search of a sweep has suggested.
        chat_templates: The chat templates that data of the jobs name, by the setting
            `chat_template`: a file may change later.
        ended: Jobs that had ended when the replicas were chosen, which need not hold
            them.
    """

    __pydantic_config__ = STRICT

    started: IsoTime
    identity: RunIdentity
    config: dict[str, Any]
    base_model: OneLine
    linear_names: tuple[OneLine, ...]
    model_type: OneLine | None = None
    base_revision: OneLine | None = None
    requests: SavedRequests = dataclasses.field(default_factory=dict)
    added: list[JobName] = dataclasses.field(default_factory=list)
    suggested: list[JobName] = dataclasses.field(default_factory=list)
    ended: list[JobName] = dataclasses.field(default_factory=list)
    chat_templates: dict[str, str | dict[str, str]] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        """Checks that all jobs that are named are the run's; see `read_sealed`."""
        requested = {name for names in self.requests.values() for name in names}
        kinds = {"requests": requested, "added": self.added, "ended": self.ended}
        for kind, names in kinds.items():
            if not self.identity.jobs.keys() >= set(names):
                raise ValueError(f"{kind} has other jobs than identity.")

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        """The settings of each job, by name, without what is only compared."""
        known, jobs = LoraJob.model_fields, self.identity.jobs.items()
        return {n: {k: v for k, v in job.items() if k in known} for n, job in jobs}

    def changes(self, saved: "RunRecord") -> list[str]:
        """Describes what has changed since a record was saved, for the log."""
        out = _changed("", saved.config, self.config)
        now, then = self.identity.jobs, saved.identity.jobs
        for name, job in now.items():
            if name in then:
                out += _changed(f"job {name!r}: ", then[name], job)
            else:
                out.append(f"job {name!r} was added")
        kept = [name for name in now if name in then]
        if kept != [name for name in then if name in now]:
            out.append(f"the order of the jobs is now {', '.join(kept)}")
        return out


def _changed(whose: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{whose}{key} was {then.get(key)!r} and is {now.get(key)!r}"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]


def sealed_json(value: SavedRun | RunRecord, *, indent: int | None = None) -> str:
    """Returns the text of a file that `read_sealed` reads.

    Args:
        value: Contents of the file.
        indent: Spaces of indentation; None: it is one line.
    """
    fields = type_adapter(type(value)).dump_python(value, mode="json")
    return json.dumps(sealed({"format": FORMAT, **fields}), indent=indent) + "\n"


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Adds a checksum to JSON values, by which damage is detected."""
    return {**values, "checksum": checksum(values)}


def checksum(values: Any) -> str:
    """Returns a checksum of JSON values, in which the order of keys counts."""
    text = json.dumps(values, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def read_sealed[T](path: pathlib.Path, kind: type[T], cure: str) -> T:
    """Reads a file of sealed values.

    Args:
        path: File with a JSON object: `format`, the fields of `kind`, and `checksum`.
        kind: `SavedRun` or `RunRecord`.
        cure: Sentence that says what to do if the file cannot be used.

    Raises:
        CheckpointError: The file is missing, damaged or of another format, or a value
            breaks a rule.
    """
    try:
        check_regular_file(path)
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
        found, seal = values.get("format"), values.pop("checksum", None)
        if found == FORMAT and seal != checksum(values):
            raise ValueError("its checksum does not match its contents")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. {cure}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {cure}") from None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r}, and this version of jaxlora reads format "
            f"{FORMAT}. {cure}"
        )
    del values["format"]
    _drop_hints(values)
    try:
        return type_adapter(kind).validate_json(json.dumps(values))
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{format_errors(error, str(path))}\n{cure}") from None


def _drop_hints(values: dict[str, Any]) -> None:
    """Drops findings of an earlier packer, which runs of older versions have saved."""
    stream = values.get("stream")
    if isinstance(stream, dict):
        for found in (stream, stream.get("state")):
            if isinstance(found, dict):
                found.pop("hint", None)
