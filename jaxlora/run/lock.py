"""A lock that lets only one process at a time write to a run's folder.

The process holds the kernel's lock (flock) on `run.lock` and on the folder itself. The
kernel releases both when the process ends, for whatever reason. So on one host a lock
is never stale, whatever `run.lock` says. The lock on the folder persists even if
`run.lock` is removed.

On some shared file systems such locks are local to a host or do not exist. Therefore
`run.lock` also names the owner, and the owner touches it every few seconds. If the
kernel's lock does not show whether that owner is alive, a new process watches the file:
if it is not touched for `_TIMEOUT_SECONDS`, the owner has ended. Clocks are not
compared.
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
import threading
import time

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.common.json_file import open_regular_file, read_regular_file
from jaxlora.errors import CheckpointError
from jaxlora.printable import one_line

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_TOUCH_SECONDS = 5.0
_TIMEOUT_SECONDS = 30.0
_MAX_BYTES = 4096
# Another process may hold the lock for a moment, to test whether the run is active.
_ATTEMPTS, _RETRY_SECONDS = 5, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that holds a run's folder, as described in `run.lock`.

    Attributes:
        host: Name of the machine.
        boot: Id of the machine's current boot.
        pid: Process id on that machine.
        user: Name of the user who started the process.
        command: Command line.
        since: Time at which the process took the folder.
    """

    host: str
    boot: str
    pid: int
    user: str
    command: str
    since: str

    @staticmethod
    def this_process() -> "Owner":
        """Describes this process."""
        return Owner(
            host=socket.gethostname(),
            boot=_boot(),
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


_UNKNOWN = Owner(host="?", boot="?", pid=0, user="?", command="?", since="?")


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
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._touch, daemon=True)

    def __enter__(self) -> "RunLock":
        """Takes the lock.

        Raises:
            CheckpointError: Another run is using the folder; the text names it. Or
                something else than a file is in the place of run.lock.
            StorageError: The folder cannot be written.
        """
        with wrap_os_errors(self._path):
            self._created_folder = not self._folder.exists()
            make_folder(self._folder)
            try:
                self._lock_folder()
                self._become_owner()
            except BaseException:
                self._close()
                raise
        self._heartbeat.start()
        return self

    def _lock_folder(self) -> None:
        self._directory = os.open(self._folder, os.O_RDONLY)
        if _lock(self._directory) is False:
            raise _in_use(self._folder)

    def _become_owner(self) -> None:
        """Locks run.lock once its owner has ended, and names this process in it."""
        handle, is_certain = self._lock_file()
        self._file = handle
        owner = read_owner(self._path)
        is_dead = is_certain and (owner is None or owner.boot == _boot())
        if not is_dead and _is_touched(self._path):
            raise _in_use(self._folder)
        if owner is not None:
            logger.warning(
                "%s: taking over from %s, which has ended", self._path, owner
            )
        self._text = json.dumps(dataclasses.asdict(Owner.this_process())).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, self._text, 0)
        os.fsync(handle)
        sync_folder(self._folder)

    def _lock_file(self) -> tuple[int, bool]:
        """Opens the lock file; also returns whether the kernel's lock was obtained."""
        for _ in range(_ATTEMPTS):
            check_lock_file(self._path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(self._path, flags, 0o666)
            is_locked = _lock(handle)
            # Another process may have removed the file between the two calls.
            if is_locked is not False and _is_same(handle, self._path):
                return handle, is_locked is True
            os.close(handle)
            time.sleep(_RETRY_SECONDS)
        raise _in_use(self._folder)

    def _touch(self) -> None:
        while not self._ended.wait(_TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._path)

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

    def check(self) -> None:
        """Checks that this run still holds the folder, before something is written.

        Raises:
            CheckpointError: run.lock was removed, and another run holds the folder; or
                the folder itself was removed or renamed.
        """
        self.check_folder()
        if _is_same(self._file, self._path):
            if os.pread(self._file, _MAX_BYTES, 0) == self._text:
                return
            raise _in_use(self._folder)
        logger.warning(
            "%s was removed while the run is active; writing it again", self._path
        )
        os.close(self._file)
        self._file = -1
        with wrap_os_errors(self._path):
            self._become_owner()

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._heartbeat.join()
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
    """Whether a process on this host is writing to a run's folder."""
    try:
        file = open_regular_file(folder / LOCK_FILE, follow=False)
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def find_owner(folder: pathlib.Path) -> Owner | None:
    """Returns the process that writes to a run's folder, on any host.

    For a process on another host, it waits up to 12 s to see whether it is alive.

    Returns:
        The process; None if there is none. If `run.lock` is damaged, its fields say so.
    """
    owner = read_owner(folder / LOCK_FILE)
    if is_in_use(folder):
        return owner or _UNKNOWN
    if owner is None or owner.boot == _boot():
        return None
    path, wait = folder / LOCK_FILE, 2 * _TOUCH_SECONDS + 2
    try:
        return owner if _is_touched(path, wait) else None
    except OSError:
        return None  # the process ended and removed the file


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


def _lock(handle: int) -> bool | None:
    """Takes the kernel's lock; False if another holds it, None if locks do not work."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # NFS does not support locks on folders, and some file systems have no locks.
        missing = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
        if error.errno not in (*missing, errno.EINVAL):
            raise
        return None
    return True


def _is_same(handle: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _is_touched(path: pathlib.Path, timeout: float | None = None) -> bool:
    """Watches whether the owner of a lock file, on any host, keeps touching it."""
    timeout = _TIMEOUT_SECONDS if timeout is None else timeout
    if not path.stat().st_size:
        return False  # no owner is named yet
    logger.warning(
        "%s names %s; waiting up to %g s to see whether it is alive",
        path,
        read_owner(path) or "an owner that cannot be read",
        timeout,
    )
    first = _touched_at(path)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        time.sleep(timeout / 30)
        if _touched_at(path) != first:
            return True
    return False


def _touched_at(path: pathlib.Path) -> int:
    """Returns a file's mtime; opening it makes network file systems refresh it."""
    with open_regular_file(path, follow=False) as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _boot() -> str:
    try:
        path = pathlib.Path("/proc/sys/kernel/random/boot_id")
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may not know the user's name
        return f"user {os.getuid()}"
