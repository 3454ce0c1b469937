"""The folder through which requests reach a live run, and answers come back.

A request is a file `<id>.request.json` in the folder `control` of a run, and its answer
is `<id>.answer.json`. Files appear under their name only when they are complete. A
folder works on every file system that the run itself can use, also if the run is on
another host; a request that was made survives a kill of either side.

Only the user who runs the process may enter the folder. So a user who can write a
request could also stop the process. Files are JSON of a fixed form; nothing in them is
executed.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import secrets
import stat
import time
from typing import Any, Literal

import pydantic

from jaxlora.common.atomic import remove_leftovers, wrap_os_errors, write_bytes
from jaxlora.common.json_file import open_regular_file
from jaxlora.errors import ConfigError
from jaxlora.run.saved_fields import STRICT, JobName, type_adapter

logger = logging.getLogger(__name__)

FOLDER = "control"
_REQUEST, _ANSWER = ".request.json", ".answer.json"
_ID = re.compile(r"[0-9]{20}-[0-9a-f]{16}")
_MAX_BYTES = 1 << 20
_MAX_AGE_SECONDS = 86_400.0
_MODE = 0o600  # of the files; the folder is 0o700

Action = Literal["stop", "pause", "resume", "add", "clone"]
# What a job does once such a request is accepted.
DONE = {
    "stop": "stops after its current global batch",
    "pause": "leaves its slot after its current global batch",
    "resume": "continues when a slot is free",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlRequest:
    """A request of the user to a live run.

    Attributes:
        action: What is asked for.
        job: Name of the job.
        reason: Text that says why, for `stop` and `pause`.
        settings: Settings of the job to add, or what a clone of the job changes, with
            its `name`, as JSON values; None for other actions.
    """

    __pydantic_config__ = STRICT

    action: Action
    job: JobName
    reason: str = ""
    settings: dict[str, Any] | None = None

    def __post_init__(self):
        """Checks that the fields belong together; see `Mailbox.read`."""
        if (self.action in ("add", "clone")) != (self.settings is not None):
            raise ValueError(f"the action {self.action} and settings contradict.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of a run to a request.

    Attributes:
        is_accepted: Whether the run does what was asked for.
        text: Says what happens now, or why the request was refused.
    """

    __pydantic_config__ = STRICT

    is_accepted: bool
    text: str


class Mailbox:
    """The requests to a run, and the answers."""

    def __init__(self, run_folder: pathlib.Path):
        """Makes the object; `create` or `check` comes first.

        Args:
            run_folder: Folder of the run.
        """
        self._folder = run_folder / FOLDER
        self._ignored: set[str] = set()

    def create(self) -> None:
        """Makes the folder if there is none, and removes answers that nobody reads.

        The run's own folder exists.

        Raises:
            ConfigError: Somebody else may write to the folder.
            StorageError: It cannot be made.
        """
        with wrap_os_errors(self._folder):
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            self.check()
            remove_leftovers(self._folder)
            oldest = time.time() - _MAX_AGE_SECONDS
            for name in self._names(_ANSWER):
                path = self._folder / (name + _ANSWER)
                with contextlib.suppress(FileNotFoundError):
                    if path.lstat().st_mtime < oldest:
                        path.unlink()

    def check(self) -> None:
        """Checks that only its owner, who is this user, may write to the folder.

        Raises:
            ConfigError: There is no such folder, or others may use it.
        """
        try:
            found = self._folder.lstat()
        except FileNotFoundError:
            raise ConfigError(
                f"{self._folder.parent} takes no requests: it has no folder {FOLDER}. "
                "Check the path; it is the output_dir of a run."
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{self._folder} is not a folder. Remove it.")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{self._folder} belongs to user {found.st_uid}, and only its owner "
                "may send requests to the run."
            )
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise ConfigError(
                f"{self._folder} may be used by other users (mode {mode:o}). Make sure "
                f"that its files are yours, then run: chmod 700 {self._folder}"
            )

    # ---- the sender ----------------------------------------------------------------

    def post(self, request: ControlRequest) -> str:
        """Makes a request, and returns its id."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(8)}"
        self._write(name + _REQUEST, dataclasses.asdict(request))
        return name

    def withdraw(self, name: str) -> bool:
        """Takes a request back; whether it was still there."""
        try:
            (self._folder / (name + _REQUEST)).unlink()
        except FileNotFoundError:
            return False
        return True

    def take_answer(self, name: str) -> Answer | None:
        """Returns the answer to a request, and removes it; None if there is none yet.

        Raises:
            ConfigError: The file is not an answer.
        """
        path = self._folder / (name + _ANSWER)
        try:
            answer = self._read(path, Answer)
        except FileNotFoundError:
            return None
        path.unlink(missing_ok=True)
        return answer

    # ---- the run -------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the ids of the requests, oldest first.

        Raises:
            OSError: The folder is missing or cannot be read.
        """
        return sorted(self._names(_REQUEST))

    def _names(self, suffix: str) -> list[str]:
        """Returns the ids of the requests or answers, which are files; logs others."""
        names = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(suffix)
                if name == entry.name or not _ID.fullmatch(name):
                    continue
                if entry.is_file(follow_symlinks=False):
                    names.append(name)
                elif entry.name not in self._ignored:
                    self._ignored.add(entry.name)
                    logger.warning(
                        "%s is ignored, because it is no file. Remove it.", entry.path
                    )
        return names

    def read(self, name: str) -> ControlRequest:
        """Reads a request.

        Raises:
            ConfigError: The file is not a request of this user.
            FileNotFoundError: It was withdrawn.
        """
        return self._read(self._folder / (name + _REQUEST), ControlRequest)

    def answer(self, name: str, answer: Answer) -> None:
        """Answers a request, and then removes it.

        Raises:
            StorageError: The answer cannot be written.
            OSError: The request cannot be removed.
        """
        if (self._folder / (name + _REQUEST)).exists():
            self._write(name + _ANSWER, dataclasses.asdict(answer))
            self.withdraw(name)

    # ---- files ---------------------------------------------------------------------

    def _write(self, name: str, values: dict) -> None:
        data = json.dumps(values).encode()
        write_bytes(self._folder / name, data, mode=_MODE)

    def _read[T](self, path: pathlib.Path, kind: type[T]) -> T:
        try:
            with open_regular_file(path, follow=False) as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    raise ConfigError(f"{path} is not a file of this user.")
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES:,} bytes.")
        try:
            return type_adapter(kind).validate_json(data)
        except pydantic.ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{path} has another form: {reason}.") from None
