"""The state that a run saves on the disk, and its validation when it is read.

A file in a run's folder is untrusted: it may be damaged or come from another source.
So every name, number and shape that is read is validated like the user's input.
"""

import dataclasses
import datetime
import json
import pathlib
import re
import unicodedata
from collections.abc import Collection
from typing import Annotated, Any, Literal

import pydantic
import xxhash
from pydantic import AfterValidator, Field

from jaxlora.adapters.tensors import tensor_of
from jaxlora.config import check_job_name
from jaxlora.errors import CheckpointError
from jaxlora.strict import format_errors
from jaxlora.train.job_run import JobProgress

_LINEAR = re.compile(r"model\.layers\.\d{1,6}(\.[A-Za-z0-9_]{1,100}){1,6}")
_TABLE = re.compile(r"(layers\.\d{1,6}\.[A-Za-z0-9_.]+)\.[a-z_]+")
_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _job_name(name: str) -> str:
    return check_job_name(name)


def _linear_name(name: str) -> str:
    if not _LINEAR.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a linear.")
    return name


def _one_line(text: str) -> str:
    if not text or any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ValueError("wanted one line of text.")
    return text


def _iso_time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


JobName = Annotated[str, AfterValidator(_job_name)]
LinearName = Annotated[str, AfterValidator(_linear_name)]
OneLine = Annotated[str, Field(max_length=4096), AfterValidator(_one_line)]
Size = Annotated[int, Field(gt=0, lt=2**40)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Properties that must be equal for a checkpoint to continue a run; JSON values.

    Attributes:
        base: Fingerprint of the base model.
        settings: Settings that affect the numerical results, by name.
        jobs: Each job's settings, and a fingerprint of its data, by job name. Their
            order matters, because slots and microbatches are filled in this order.
    """

    __pydantic_config__ = _STRICT

    base: str
    settings: dict[str, Any]
    jobs: dict[JobName, dict[str, Any]]

    def differences(
        self, other: "RunIdentity", where: str = "the checkpoint"
    ) -> list[str]:
        """Describes, in sentences, how a saved identity differs from this run's.

        Args:
            other: Identity that was saved.
            where: Describes the file that it was saved in.
        """
        out = []
        if self.base != other.base:
            out.append(
                f"the base model is another one (fingerprint {other.base[:12]} in "
                f"{where}, {self.base[:12]} now)"
            )
        out += _different("", where, other.settings, self.settings)
        for name in dict.fromkeys([*other.jobs, *self.jobs]):
            if name not in self.jobs:
                out.append(f"job {name!r} is in {where} but not in this run")
            elif name not in other.jobs:
                out.append(f"job {name!r} is in this run but not in {where}")
            else:
                then, now = other.jobs[name], self.jobs[name]
                out += _different(f"job {name!r}: ", where, then, now)
        before, after = list(other.jobs), list(self.jobs)
        if before != after and set(before) == set(after):
            out.append(
                f"the order of the jobs is {', '.join(before)} in {where} and "
                f"{', '.join(after)} now"
            )
        return out


def _different(
    whose: str, where: str, then: dict[str, Any], now: dict[str, Any]
) -> list[str]:
    return [
        f"{whose}{key} is {then.get(key)!r} in {where} and {now.get(key)!r} now"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedAdapter:
    """The shape of a job's adapter, and which of its weights are exported.

    Attributes:
        modules: (rank, lora_alpha) of each adapted linear, by name.
        use_rslora: Whether the scaling divides by the root of the rank.
        dropout: Dropout rate in training.
        keep_best: Whether the weights of the best evaluation are exported.
    """

    __pydantic_config__ = _STRICT

    modules: dict[LinearName, tuple[Size, Annotated[float, Field(gt=0)]]]
    use_rslora: bool
    dropout: Annotated[float, Field(ge=0, lt=1)]
    keep_best: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedRequests:
    """Requests of the user that are in force.

    Attributes:
        stopping: Jobs to stop, and the reasons.
        pausing: Jobs to keep out of the slots until they are resumed, and the reasons.
    """

    __pydantic_config__ = _STRICT

    stopping: dict[JobName, str] = dataclasses.field(default_factory=dict)
    pausing: dict[JobName, str] = dataclasses.field(default_factory=dict)

    def check_names(self, names: Collection[str]) -> None:
        """Checks that all requests are for jobs of these names.

        Raises:
            ValueError: There is another job.
        """
        if not {*self.stopping, *self.pausing} <= set(names):
            raise ValueError("requests has other jobs than identity.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """State of a run that a checkpoint keeps besides the tables.

    Attributes:
        identity: Identity of the run.
        progress: Each job's progress, by name.
        adapters: The shape of each job's adapter, by name.
        base_model: Folder or hub id of the base.
        linear_names: Names of the base's linears.
        requests: Requests to stop and to pause jobs.
        base_revision: Commit of a base from the hub; None for a folder.
    """

    __pydantic_config__ = _STRICT

    identity: RunIdentity
    progress: dict[JobName, JobProgress]
    adapters: dict[JobName, SavedAdapter]
    base_model: OneLine
    linear_names: list[LinearName]
    requests: SavedRequests
    base_revision: OneLine | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """The metadata of a checkpoint.

    Attributes:
        run: State of the run besides the tables.
        layout: Shape of each table in the arrays, by path, in order.
        checksums: XXH3 of each array's bytes, by kind.
    """

    __pydantic_config__ = _STRICT

    run: SavedRun
    layout: dict[str, Annotated[list[Size], Field(min_length=2, max_length=3)]]
    checksums: dict[Literal["params", "mu", "nu"], str]

    def __post_init__(self):
        """Checks that the fields are consistent; see `read_sealed`."""
        names = sorted(self.run.identity.jobs)
        for kind in ("progress", "adapters"):
            if sorted(getattr(self.run, kind)) != names:
                raise ValueError(f"{kind} has other jobs than identity.")
        self.run.requests.check_names(names)
        self._check_slots()
        ranks = self._ranks()
        for name, adapter in self.run.adapters.items():
            for module, (rank, _) in adapter.modules.items():
                if rank > ranks.get(module, 0):
                    raise ValueError(
                        f"job {name} has rank {rank} on {module}, and the tables have "
                        f"room for {ranks.get(module, 0)}."
                    )

    def _check_slots(self) -> None:
        counts = {shape[0] for shape in self.layout.values()}
        if len(counts) != 1:
            raise ValueError("layout has no tables, or of different numbers of slots.")
        slots = [p.slot for p in self.run.progress.values() if p.slot is not None]
        if len(set(slots)) < len(slots) or not set(slots) <= set(range(*counts)):
            raise ValueError(f"slots {slots} are not different ones of {counts}.")
        for name, progress in self.run.progress.items():
            lacks_slot = progress.status == "running" and progress.slot is None
            if not 0 <= progress.step < 2**53 or lacks_slot:
                raise ValueError(
                    f"job {name} is {progress.status} at step {progress.step} in slot "
                    f"{progress.slot}."
                )

    def _ranks(self) -> dict[str, int]:
        """Returns the rank of each linear's tables; checks that its tables match."""
        ranks = {}
        for path, (_, *sizes) in self.layout.items():
            match = _TABLE.fullmatch(path)
            if match is None:
                raise ValueError(f"{path!r} is no name of a table.")
            linear = f"model.{match[1]}"
            dimensions = tensor_of(path).dimensions
            if len(dimensions) != len(sizes):
                raise ValueError(f"{path!r} has {len(sizes)} dimensions a slot.")
            for letter, size in zip(dimensions, sizes, strict=True):
                if letter == "R" and ranks.setdefault(linear, size) != size:
                    raise ValueError(f"the tables of {linear} differ in rank.")
        return ranks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The contents of `run.json`, which identifies the run from its start on.

    Attributes:
        started: Start time in ISO format, because chat templates may print the date.
        identity: Identity at the start, with the jobs that were added since.
        requests: Requests to stop and to pause jobs. Here they also outlive a kill
            before the next checkpoint.
    """

    __pydantic_config__ = _STRICT

    started: Annotated[str, AfterValidator(_iso_time)]
    identity: RunIdentity
    requests: SavedRequests = dataclasses.field(default_factory=SavedRequests)

    @property
    def microbatch_tokens(self) -> int:
        """Capacity of the run as a number, even if the setting was `auto`."""
        return self.identity.settings["microbatch_tokens"]

    def __post_init__(self):
        """Checks what is used before the identities are compared."""
        tokens = self.identity.settings.get("microbatch_tokens")
        if type(tokens) is not int or not 0 < tokens < 2**31:
            raise ValueError(f"microbatch_tokens is {tokens!r}, no number of tokens.")
        self.requests.check_names(self.identity.jobs)


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Adds a checksum to JSON values, by which damage is detected."""
    return {**values, "checksum": _checksum(values)}


def _checksum(values: dict[str, Any]) -> str:
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
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
        found, checksum = values.get("format"), values.pop("checksum", None)
        if found == version and checksum != _checksum(values):
            raise ValueError("its checksum does not match its contents")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. {cure}"
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
        return pydantic.TypeAdapter(kind).validate_json(json.dumps(values))
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{format_errors(error, str(path))}\n{cure}") from None
