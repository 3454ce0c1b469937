"""A lock that lets only one process at a time write to a run's folder.

The process holds the kernel's lock (flock) on `run.lock` and on the folder itself. The
kernel releases both when the process ends, for whatever reason, so a lock is never
stale, whatever `run.lock` says. The lock on the folder persists even if `run.lock` is
removed. Processes on several hosts exclude each other if the file system's locks do, as
those of NFS; `run.lock` names the owner, and the owner looks at it before it writes.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import getpass
import json
import logging
import os
import pathlib
import shlex
import socket
import stat
import sys
import time

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.common.json_file import read_regular_file
from jaxlora.errors import CheckpointError, StorageError
from jaxlora.printable import one_line

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_MAX_BYTES = 4096
_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP
# Another process may hold the lock for a moment, to test whether the run is active.
_ATTEMPTS, _RETRY_SECONDS = 5, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that holds a run's folder, as described in `run.lock`.

    Attributes:
        host: Name of the machine.
        pid: Process id on that machine.
        user: Name of the user who started the process.
        command: Command line.
        since: Time at which the process took the folder.
    """

    host: str
    pid: int
    user: str
    command: str
    since: str

    @staticmethod
    def this_process() -> "Owner":
        """Describes this process."""
        return Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=_user(),
            command=one_line(shlex.join(sys.orig_argv))[:200],
            since=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        return (
            f"process {self.pid} of {self.user} on {self.host}, since {self.since} "
            f"({self.command})"
        )


_UNKNOWN = Owner(host="?", pid=0, user="?", command="?", since="?")


class RunLock:
    """Keeps other processes, and other trainers of this one, out of a run's folder."""

    def __init__(self, folder: pathlib.Path):
        """Makes the object, without taking the lock.

        Args:
            folder: Folder of the run; it is created if it does not exist.
        """
        self._folder, self._path = folder, folder / LOCK_FILE
        self._file = self._directory = -1  # open files, whose locks are held
        self._text = b""
        self._created_folder = False

    def __enter__(self) -> "RunLock":
        """Takes the lock.

        Raises:
            CheckpointError: Another run is using the folder; the text names it. Or
                something else than a file is in the place of run.lock.
            StorageError: The folder cannot be written, or has no locks.
        """
        with wrap_os_errors(self._path):
            self._created_folder = not self._folder.exists()
            make_folder(self._folder)
            try:
                self._take()
                self._become_owner()
            except BaseException:
                self._close()
                raise
        return self

    def _take(self) -> None:
        """Opens the folder and run.lock, and locks both."""
        for _ in range(_ATTEMPTS):
            check_lock_file(self._path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self._directory = os.open(self._folder, os.O_RDONLY)
            is_free = True
            with contextlib.suppress(OSError):  # NFS has locks on files only
                is_free = _lock(self._directory)
            if is_free:
                self._file = os.open(self._path, flags, 0o666)
                # Another process may have removed the file between the two calls.
                if self._lock_file() and _is_same(self._file, self._path):
                    return
            self._close()
            time.sleep(_RETRY_SECONDS)
        raise _in_use(self._folder)

    def _lock_file(self) -> bool:
        try:
            return _lock(self._file)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise StorageError(
                f"{self._path} cannot be locked ({error.strerror}), and only a lock "
                "keeps another run out of the folder. Choose an output_dir on a file "
                "system with locks (flock), or mount this one with them."
            ) from error

    def _become_owner(self) -> None:
        """Names this process in run.lock."""
        if (owner := read_owner(self._path)) is not None:
            logger.warning(
                "%s: taking over from %s, which has ended", self._path, owner
            )
        self._text = json.dumps(dataclasses.asdict(Owner.this_process())).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, self._text, 0)
        os.fsync(self._file)
        sync_folder(self._folder)

    def check_folder(self) -> None:
        """Checks that the folder is still the one that was locked.

        Raises:
            CheckpointError: It was removed, renamed or replaced.
        """
        if self._directory < 0 or _is_same(self._directory, self._folder):
            return
        raise CheckpointError(
            f"{self._folder} was removed or renamed while the run trained in it, so "
            "the run has ended. If it was renamed, rename it back and continue with "
            "--resume: only the steps since the last checkpoint are lost. If it was "
            "removed, its checkpoints, exported adapters and metrics are lost too: "
            "restore it from a copy and use --resume, or start anew without."
        )

    def make_folder(self, name: str) -> None:
        """Makes a folder in the one that was locked, wherever that is by now.

        Raises:
            OSError: It cannot be made.
        """
        assert self._directory >= 0, "the folder is not locked"
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._directory)

    def check(self) -> None:
        """Checks that this run still holds the folder, before something is written.

        Raises:
            CheckpointError: run.lock names another run, which a file system whose locks
                end at a host does not keep out; or it is no file any more; or the
                folder itself was removed or renamed.
        """
        self.check_folder()
        check_lock_file(self._path)
        with wrap_os_errors(self._path), contextlib.suppress(FileNotFoundError):
            found = read_regular_file(self._path, follow=False, limit=_MAX_BYTES)
            if found != self._text:
                raise _in_use(self._folder)

    def __exit__(self, *_) -> None:
        # If the folder can no longer be written, run.lock still names this process.
        # That does no harm: the next start finds that this process has ended.
        with contextlib.suppress(OSError):
            if _is_same(self._file, self._path):
                self._path.unlink()
            is_ours = self._created_folder and _is_same(self._directory, self._folder)
            if is_ours and not any(self._folder.iterdir()):
                self._folder.rmdir()
        self._close()

    def _close(self) -> None:
        for handle in (self._file, self._directory):
            if handle >= 0:
                os.close(handle)
        self._file = self._directory = -1


def check_not_in_use(folder: pathlib.Path) -> None:
    """Refuses a folder that another run is writing to; changes nothing.

    This is called early, so that a start that must fail does not load a model first.

    Raises:
        CheckpointError: Another run is using the folder, which the text names, or
            something else than a file is in the place of run.lock.
    """
    check_lock_file(folder / LOCK_FILE)
    if is_in_use(folder):
        raise _in_use(folder)


def check_lock_file(path: pathlib.Path) -> None:
    """Checks that a lock file, if there is one, is a file.

    Raises:
        CheckpointError: It is a pipe, a folder, a symbolic link or the like.
    """
    try:
        is_file = stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return  # missing, or the folder cannot be used, which its next use says
    if not is_file:
        raise CheckpointError(
            f"{path} is not a regular file, so it does not show whether a run is using "
            "the folder. Move it away, or choose another output_dir."
        )


def is_in_use(folder: pathlib.Path) -> bool:
    """Whether a process is writing to a run's folder."""
    path = folder / LOCK_FILE
    place = path if os.path.lexists(path) else folder  # it may have been removed
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        handle = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        opened.callback(os.close, handle)
        return not _lock(handle, fcntl.LOCK_SH)
    return False


def find_owner(folder: pathlib.Path) -> Owner | None:
    """Returns the process that writes to a run's folder.

    Returns:
        The process; None if there is none. If `run.lock` is damaged, its fields say so.
    """
    if not is_in_use(folder):
        return None
    return read_owner(folder / LOCK_FILE) or _UNKNOWN


def read_owner(path: pathlib.Path) -> Owner | None:
    """Reads the owner from a lock file; None if the file is missing or damaged."""
    try:
        values = json.loads(read_regular_file(path, follow=False, limit=_MAX_BYTES))
        owner = Owner(**values)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    words = [str(value) for value in dataclasses.astuple(owner)]
    return owner if all(word.isprintable() for word in words) else None


def _in_use(folder: pathlib.Path) -> CheckpointError:
    owner = read_owner(folder / LOCK_FILE)
    who = owner or "another process; its run.lock was removed or is damaged"
    return CheckpointError(
        f"{folder} is in use by {who}. Two runs cannot share a folder: wait until that "
        "one has ended, stop it, or choose another output_dir."
    )


def _lock(handle: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Takes the kernel's lock; False: another process holds it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(handle: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may not know the user's name
        return f"user {os.getuid()}"
