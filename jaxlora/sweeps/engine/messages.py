"""Messages between the driver of a sweep and the worker of a group of devices.

Each is one line of JSON: the name of its class as `kind`, and its fields. They pass
through pipes on one host, and through an actor of Ray to others.
"""

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from typing import Any, get_args

from jaxlora.run.saved_fields import Count, Size

# ---- to a worker -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The first message: what to train.

    Attributes:
        run: Settings of the group's run, with all configurations, as JSON values. None
            of them trains before it is given.
    """

    run: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Give:
    """A configuration to train.

    Attributes:
        name: Its name.
        sources: Folders of runs that may have its state, the newest first. It starts
            anew if none has.
        settings: Its settings, if it is not among those of `Begin`.
    """

    name: str
    sources: list[str] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
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
    stop: list[str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """All verdicts that follow from a message `Evaluated` were sent.

    Attributes:
        number: Number of that message.
    """

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """The ledger has the step at which a copy starts, so it may start.

    Attributes:
        name: The copy.
    """

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A user's request.

    Attributes:
        action: `stop`, `pause` or `resume`.
        name: The configuration.
        reason: Text that says why.
    """

    action: str
    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A configuration is to leave with its state, for another group.

    Attributes:
        name: The configuration.
    """

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Another group has the state of a released configuration.

    Attributes:
        name: The configuration.
    """

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Nothing more will come: the run ends when nothing is left to train."""


# ---- from a worker ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Configurations were read and can be trained.

    Attributes:
        jobs: The fields of their `JobFacts`.
    """

    jobs: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A configuration of `Give` cannot be trained.

    Attributes:
        name: The configuration.
        reason: Text that says why.
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Configurations were evaluated; training waits for `Judged`.

    Attributes:
        number: Counts these messages of a worker.
        points: (name, steps done, held-out loss, value of the sweep's metric of
            answers or None) of each.
    """

    number: int
    points: list[list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """The process is not stopped, whatever the thread that trains does."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The thread that trains is alive; sent every few seconds.

    Attributes:
        jobs: The fields of `JobProgress` of configurations that have changed, by name.
        tokens_per_second: Speed of the latest window; None before the first.
        resources: What the host reports, by name.
    """

    jobs: dict[str, dict[str, Any]]
    tokens_per_second: float | None = None
    resources: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A configuration has ended, and its files are on the disk.

    Attributes:
        name: The configuration.
        progress: The fields of its `JobProgress`.
        folder: Its PEFT folder, which the driver may have moved already; None if there
            is none.
    """

    name: str
    progress: dict[str, Any]
    folder: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint of this group has the state of a configuration, if it has any.

    Attributes:
        name: The configuration.
        is_released: Whether it has left its slot for another group.
    """

    name: str
    is_released: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The worker ends by an error.

    Attributes:
        reason: The error.
        is_final: Whether it would fail in the same way again.
    """

    reason: str
    is_final: bool


ToWorker = Begin | Give | Verdict | Judged | Noted | Ask | Release | Drop | Finish
FromWorker = Ready | Refused | Evaluated | Alive | Progress | Ended | Saved | Failed
Message = ToWorker | FromWorker
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Returns a message as a line."""
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    values = {"kind": type(message).__name__, **fields}
    return json.dumps(values).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Reads a line that `encode` has made.

    Raises:
        ValueError: It is none.
    """
    try:
        values = json.loads(line)
        return _KINDS[values.pop("kind")](**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{line[:200]!r} is no message of a sweep: {error}") from None


class Link:
    """The worker's end of the pipes: sends, and receives in a thread."""

    def __init__(self, read: int, write: int):
        """Makes the object; `listen` comes next.

        Args:
            read: File descriptor of the pipe from the driver.
            write: That of the pipe to it.
        """
        self._read, self._write = read, write
        self._sending = threading.Lock()

    @staticmethod
    def of_this_process() -> "Link":
        """Takes the standard input and output; what is printed goes to stderr."""
        read, write = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        return Link(read, write)

    def send(self, message: FromWorker) -> None:
        """Sends a message from any thread; it is lost if the driver has ended."""
        rest = memoryview(encode(message))
        try:
            with self._sending:
                while rest:
                    rest = rest[os.write(self._write, rest) :]
        except BrokenPipeError:
            return

    def listen(
        self, receive: Callable[[Message], None], ended: Callable[[], None]
    ) -> None:
        """Calls functions from a thread of its own.

        Args:
            receive: Is called with each message of the driver.
            ended: Is called when the driver has ended, or wants this process to end.
        """

        def read() -> None:
            with os.fdopen(self._read, "rb") as file:
                for line in file:
                    receive(decode(line))
            ended()

        threading.Thread(target=read, daemon=True, name="driver").start()
