"""Messages between the driver of a sweep and the worker of a group of devices.

A message is sent as the name of its class and its fields as JSON, and is checked when
it comes, like a file. So a peer can send messages, but no code, as it could with
pickled objects.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import pydantic

from jaxlora.config import LoraJob
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_fields import STRICT, Count, JobName, Size

Point = tuple[JobName, Count, float, float | None]
Action = Literal["stop", "pause", "resume", "release", "drop", "begin"]


class _Checked(pydantic.BaseModel):
    """Values that are checked: all fields must have the right types."""

    model_config = STRICT | pydantic.ConfigDict(frozen=True)


# ---- to a worker -----------------------------------------------------------------


class Begin(_Checked):
    """The first message: what to train.

    Attributes:
        run: Settings of the group's run, with all configurations, as JSON values. None
            of them trains before it is given.
    """

    run: dict[str, Any]


class Give(_Checked):
    """A configuration to train.

    Attributes:
        name: Its name.
        sources: Folders of runs that may have its state, the newest first. It starts
            anew if none has.
        settings: Its settings, if it is not among those of `Begin`.
    """

    name: str
    sources: tuple[str, ...] = ()
    settings: LoraJob | None = None


class Verdict(_Checked):
    """The decision about a configuration that was evaluated.

    Attributes:
        name: The configuration.
        step: Optimizer steps that it had done.
        waits: Whether it waits there for others.
        stop: (rule, reason) by which it ends there; None if it does not.
    """

    name: str
    step: int
    waits: bool = False
    stop: tuple[str, str] | None = None


class Judged(_Checked):
    """All verdicts that follow from a message `Evaluated` were sent.

    Attributes:
        number: Number of that message.
    """

    number: int


class Ask(_Checked):
    """A configuration is to do something.

    Attributes:
        action: `stop`, `pause` or `resume`: a user's request. `release`: leave with its
            state, for another group. `drop`: end here, as another group has that state.
            `begin`: start as a copy, as the ledger has the step at which it does.
        name: The configuration.
        reason: Text that says why.
    """

    action: Action
    name: JobName
    reason: str = ""


class Finish(_Checked):
    """Nothing more will come: the run ends when nothing is left to train."""


class End(_Checked):
    """The run is to write a checkpoint and end, as if the driver had ended."""


# ---- from a worker ---------------------------------------------------------------


class JobFacts(_Checked):
    """A configuration, as a worker has read it.

    Attributes:
        name: Its name.
        num_steps: Its optimizer steps in all.
        rank: Largest LoRA rank of its modules in a slot.
        trained_rank: Largest rank that is trained, as the run file has it.
        num_modules: Number of modules that it adapts.
        batch_tokens: Mean number of tokens of a global batch.
        is_evaluated: Whether it has held-out samples.
        clone_step: Optimizer steps of the configuration that it is a copy of, when it
            starts; None: it is no copy.
    """

    name: str
    num_steps: Count
    rank: Size = 1
    trained_rank: Size = 1
    num_modules: Count = 1
    batch_tokens: float = 1.0
    is_evaluated: bool = True
    clone_step: Count | None = None


class Ready(_Checked):
    """Configurations were read and can be trained.

    Attributes:
        jobs: The configurations.
    """

    jobs: tuple[JobFacts, ...]


class Evaluated(_Checked):
    """Configurations were evaluated; training waits for `Judged`.

    Attributes:
        number: Counts these messages of a worker.
        points: (name, steps done, held-out loss, value of the sweep's metric of
            answers or None) of each.
    """

    number: int
    points: tuple[Point, ...]


class Alive(_Checked):
    """The process is not stopped, whatever the thread that trains does."""


class Progress(_Checked):
    """The thread that trains is alive; sent every few seconds.

    Attributes:
        jobs: Progress of the configurations that have changed, by name.
        tokens_per_second: Speed of the latest window; None before the first.
        memory: Share of the host's memory that is in use; None: it is not known.
    """

    jobs: Mapping[JobName, JobProgress]
    tokens_per_second: float | None = None
    memory: float | None = None


class Ended(_Checked):
    """A configuration has ended, and its files are on the disk.

    One that cannot be trained has failed.

    Attributes:
        name: The configuration.
        progress: How it has ended.
        folder: Its PEFT folder, which the driver may have moved already; None if there
            is none.
    """

    name: str
    progress: JobProgress
    folder: str | None = None


class Saved(_Checked):
    """A checkpoint of this group has the state of a configuration, if it has any.

    Attributes:
        name: The configuration.
        is_released: Whether it has left its slot for another group.
    """

    name: str
    is_released: bool


class Failed(_Checked):
    """The worker ends by an error.

    Attributes:
        reason: The error.
        is_final: Whether it would fail in the same way again.
    """

    reason: str
    is_final: bool


ToWorker = Begin | Give | Verdict | Judged | Ask | Finish | End
FromWorker = Ready | Evaluated | Alive | Progress | Ended | Saved | Failed
Message = ToWorker | FromWorker
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Returns the bytes of a message."""
    return f"{type(message).__name__} {message.model_dump_json()}".encode()


def decode(data: bytes) -> Any:
    """Reads a message from the bytes that `encode` has made.

    Raises:
        ValueError: They are none.
    """
    name, _, fields = data.partition(b" ")
    kind = _KINDS.get(name.decode(errors="replace"))
    if kind is None:
        raise ValueError(f"{data[:200]!r} is no message of a sweep.")
    return kind.model_validate_json(fields)
