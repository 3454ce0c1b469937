"""The state that a run saves on the disk, and its validation when it is read."""

import dataclasses
import json
import pathlib
from typing import Any, get_args

import pydantic
import xxhash

from jaxlora.common.json_file import check_regular_file
from jaxlora.common.type_adapter import type_adapter
from jaxlora.errors import CheckpointError
from jaxlora.models.layer import Remat
from jaxlora.problems import format_errors
from jaxlora.run.identity import RunIdentity
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_adapter import SavedAdapter, SavedTensors
from jaxlora.run.saved_fields import (
    STRICT,
    Count,
    IsoTime,
    JobName,
    LinearName,
    OneLine,
)
from jaxlora.run.saved_stream import SavedStream
from jaxlora.sharding.mesh_sizes import MeshSizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedRequests:
    """Requests of the user that are in force.

    Attributes:
        stopping: Jobs to stop, and the reasons.
        pausing: Jobs to keep out of the slots until they are resumed, and the reasons.
    """

    __pydantic_config__ = STRICT

    stopping: dict[JobName, str] = dataclasses.field(default_factory=dict)
    pausing: dict[JobName, str] = dataclasses.field(default_factory=dict)


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
    """State of a run that a checkpoint keeps besides the tensors of its jobs.

    Attributes:
        identity: Identity of the run.
        progress: Each job's progress, by name.
        adapters: The shape of each job's adapter, by name.
        base_model: Folder or hub id of the base.
        linear_names: Names of the base's linears.
        base_revision: Commit of a base from the hub; None for a folder.
        stream: The microbatches that follow.
        sweep: Decisions of the run's sweep; None if it has none.
        suggested: The place on each axis of configurations that were suggested.
        places: Where the data of each job that are streamed go on.
    """

    __pydantic_config__ = STRICT

    identity: RunIdentity
    progress: dict[JobName, JobProgress]
    adapters: dict[JobName, SavedAdapter]
    base_model: OneLine
    linear_names: list[LinearName]
    stream: SavedStream
    base_revision: OneLine | None = None
    sweep: SavedSweep | None = None
    suggested: dict[JobName, dict[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """The metadata of a checkpoint.

    Attributes:
        run: State of the run besides the tensors of its jobs.
        tensors: How the tensors of each job that has begun and not ended are stored.
    """

    __pydantic_config__ = STRICT

    run: SavedRun
    tensors: dict[JobName, SavedTensors]

    def __post_init__(self):
        """Checks that the fields are consistent; see `read_sealed`."""
        names = sorted(self.run.identity.jobs)
        for kind in ("progress", "adapters"):
            if sorted(getattr(self.run, kind)) != names:
                raise ValueError(f"{kind} has other jobs than identity.")
        self._check_progress()
        for name, tensors in self.tensors.items():
            tensors.check(name, self.run.adapters[name])

    def _check_progress(self) -> None:
        slots = [p.slot for p in self.run.progress.values() if p.slot is not None]
        if len(set(slots)) < len(slots) or min(slots, default=0) < 0:
            raise ValueError(f"slots {slots} are not different ones.")
        for name, progress in self.run.progress.items():
            is_running = progress.status == "running"
            if not 0 <= progress.step < 2**53 or is_running == (progress.slot is None):
                raise ValueError(
                    f"job {name} is {progress.status} at step {progress.step} in slot "
                    f"{progress.slot}."
                )
        begun = {
            name
            for name, progress in self.run.progress.items()
            if not (progress.is_over or progress.status == "waiting")
        }
        if begun != self.tensors.keys():
            raise ValueError(
                f"tensors has the jobs {sorted(self.tensors)}, and those that have "
                f"begun and not ended are {sorted(begun)}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The contents of `run.json`, which identifies the run from its start on.

    Attributes:
        started: Start time in ISO format, because chat templates may print the date.
        identity: Identity at the start, with the jobs that were added since.
        requests: Requests to stop and to pause jobs, which outlive a kill before the
            next checkpoint.
        added: Jobs that joined while the run trained. A run that resumes has them, even
            if they are not in its run file.
        suggested: Those of `added` that the search of a sweep has suggested.
        mesh: The mesh of a run with `replicas: auto`; None: it has a list of replicas,
            or its mesh was given.
        chat_templates: The chat templates that data of the jobs name, by the setting
            `chat_template`: a file may change later.
        ended: Jobs that had ended when the replicas were chosen, which need not hold
            them.
    """

    __pydantic_config__ = STRICT

    started: IsoTime
    identity: RunIdentity
    requests: SavedRequests = dataclasses.field(default_factory=SavedRequests)
    added: list[JobName] = dataclasses.field(default_factory=list)
    suggested: list[JobName] = dataclasses.field(default_factory=list)
    mesh: str | None = None
    ended: list[JobName] = dataclasses.field(default_factory=list)
    chat_templates: dict[str, str | dict[str, str]] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        """Checks what is used before the identities are compared."""
        tokens = self.identity.settings.get("microbatch_tokens")
        if type(tokens) is not int or not 0 < tokens < 2**31:
            raise ValueError(f"microbatch_tokens is {tokens!r}, no number of tokens.")
        remat = self.identity.settings.get("remat")
        if remat not in get_args(Remat):
            raise ValueError(f"remat is {remat!r}, which there is not.")
        replicas = self.identity.settings.get("replicas", [])
        if not isinstance(replicas, list) or not all(map(_is_replica, replicas)):
            raise ValueError(f"replicas is {replicas!r}, no list of replicas.")
        if self.mesh is not None:
            MeshSizes.parse(self.mesh)
        requested = {*self.requests.stopping, *self.requests.pausing}
        kinds = {"requests": requested, "added": self.added, "ended": self.ended}
        for kind, names in kinds.items():
            if not self.identity.jobs.keys() >= set(names):
                raise ValueError(f"{kind} has other jobs than identity.")
        if not set(self.suggested) <= set(self.added):
            raise ValueError("suggested has other jobs than added.")


def _is_replica(value: Any) -> bool:
    names = {"microbatch_tokens", "tensor", "count"}
    return (
        isinstance(value, dict)
        and value.keys() == names
        and all(type(n) is int and n > 0 for n in value.values())
    )


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Adds a checksum to JSON values, by which damage is detected."""
    return {**values, "checksum": checksum(values)}


def checksum(values: Any) -> str:
    """Returns a checksum of JSON values, in which the order of keys counts."""
    text = json.dumps(values, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def read_sealed[T](path: pathlib.Path, kind: type[T], *, version: int, cure: str) -> T:
    """Reads a file of sealed values.

    Args:
        path: File with a JSON object: `format`, the fields of `kind`, and `checksum`.
        kind: A dataclass of this module.
        version: Version of the format that is supported.
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
        if found == version and seal != checksum(values):
            raise ValueError("its checksum does not match its contents")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. {cure}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {cure}") from None
    if found != version:
        raise CheckpointError(
            f"{path} has format {found!r}, and this version of jaxlora reads format "
            f"{version}. {cure}"
        )
    del values["format"]
    try:
        return type_adapter(kind).validate_json(json.dumps(values))
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{format_errors(error, str(path))}\n{cure}") from None
