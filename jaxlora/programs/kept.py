"""Compiled programs on disk, from which later processes load them.

An entry is a pickle, and loading it runs code. So it is only read from a folder and a
file that belong to this user and that nobody else may write to.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import pickle
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.experimental import serialize_executable

from jaxlora.common.atomic import new_file, remove_leftovers
from jaxlora.common.cache_home import make_private, open_private, remove_oldest
from jaxlora.errors import StorageError

logger = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**30
_SUFFIX = ".program"
_HEADER = b"jaxlora program 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


class DamagedEntryError(Exception):
    """An entry cannot be used; the text says why."""


@runtime_checkable
class HasMemory(Protocol):
    """A program that says how much memory it needs, such as `jax.stages.Compiled`."""

    def memory_analysis(self) -> Any:
        """Returns sizes as in `ProgramMemory`; None: the compiler reports none."""
        ...


class ProgramMemory(NamedTuple):
    """Memory of a program, by the names of `jax.stages.Compiled.memory_analysis`."""

    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int

    @staticmethod
    def of(program: HasMemory) -> "ProgramMemory | None":
        """Returns what the compiler reports; None if it reports nothing."""
        found = program.memory_analysis()
        if found is None:
            return None
        return ProgramMemory(*(getattr(found, name) for name in ProgramMemory._fields))


class SavedProgram(NamedTuple):
    """A program that another process can load, and what is known of it before that.

    Attributes:
        executable: What `serialize_executable` makes of it.
        out_tree: The structure of its results.
        out_shapes: Their shapes.
        devices: Numbers of its devices.
        memory: Its memory, which XLA would take half a second to work out for a deep
            model's step; None: the compiler reports none.
    """

    executable: bytes
    out_tree: Any
    out_shapes: list[jax.ShapeDtypeStruct]
    devices: list[int]
    memory: ProgramMemory | None

    @staticmethod
    def read(entry: bytes) -> "SavedProgram":
        """Reads what `serialize` returned. It must come from this user.

        Raises:
            Exception: The bytes are something else.
        """
        found = pickle.loads(entry)
        if not isinstance(found, SavedProgram):
            raise TypeError(f"it holds a {type(found).__name__}")
        return found

    @property
    def out_info(self) -> Any:
        """Shapes of the results, as `jax.stages.Compiled.out_info`."""
        return jax.tree.unflatten(self.out_tree, self.out_shapes)

    def load(self, args: tuple[Any, ...]) -> jax.stages.Compiled:
        """Loads the program on its devices.

        Args:
            args: Arguments that it was compiled for, or their shapes.
        """
        by_id = {device.id: device for device in jax.devices()}
        return serialize_executable.deserialize_and_load(
            self.executable,
            jax.tree.structure((args, {})),
            self.out_tree,
            execution_devices=[by_id[number] for number in self.devices],
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeptPrograms:
    """The folder.

    Attributes:
        folder: Its path.
        max_bytes: Bound on the size of all entries; those used least recently go first.
    """

    folder: pathlib.Path
    max_bytes: int = MAX_BYTES

    def path(self, key: str) -> pathlib.Path:
        """Returns the path of an entry."""
        return self.folder / f"{key}{_SUFFIX}"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever kept."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            return next(entries, None) is None
        return False

    def has(self, key: str) -> bool:
        """Whether there is such an entry, which may be damaged.

        In a folder that cannot be searched, there is none.
        """
        return os.path.exists(self.path(key))  # `Path.exists` would raise an error

    def read(self, key: str) -> bytes | None:
        """Returns what was written under a key; None if there is no such entry.

        Raises:
            DamagedEntryError: The entry is damaged, or others may have written it.
        """
        path = self.path(key)
        try:
            with open_private(path) as file:
                os.utime(file.fileno())  # the time of its last use
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedEntryError(error.strerror) from error
        start = len(_HEADER) + _DIGEST_BYTES
        payload = data[start:]
        if data[:start] != _HEADER + hashlib.sha256(payload).digest():
            raise DamagedEntryError("it is damaged or of another version")
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """Writes an entry as a whole, and removes old ones beyond the bound.

        A folder that cannot be written is named in the log.
        """
        try:
            make_private(self.folder)
            with new_file(self.path(key), mode=0o600) as file:
                file.write(_HEADER + hashlib.sha256(payload).digest())
                file.write(payload)
            remove_leftovers(self.folder)
            remove_oldest(self.folder, _SUFFIX, self.max_bytes)
        except (OSError, StorageError) as error:
            logger.warning("a compiled program is not kept: %s", error)


def serialize(compiled: jax.stages.Compiled, what: str) -> bytes | None:
    """Returns a program as bytes; None if another process could not run it."""
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    if unloaded is None or unloaded.host_callbacks or unloaded.keepalive:
        logger.debug("%s is not kept, as it calls Python", what)
        return None
    try:
        executable, _, out_tree = serialize_executable.serialize(compiled)
        devices = [device.id for device in unloaded.device_list]
        out_shapes = [
            jax.ShapeDtypeStruct(info.shape, info.dtype)
            for info in jax.tree.leaves(compiled.out_info)
        ]
        memory = ProgramMemory.of(compiled)
        saved = SavedProgram(executable, out_tree, out_shapes, devices, memory)
        return pickle.dumps(saved)
    except Exception as error:  # a back end or a structure that has no such form
        logger.info("%s is not kept: %s", what, error)
        return None
