"""Errors that the user can correct."""

from typing import Any

from jaxlora.printable import printable


class JaxloraError(ValueError):
    """The user's input is invalid; the message says why and how to correct it.

    Attributes:
        problems: The settings that are wrong, as `jaxlora.problems.Problem`, if the
            error is about settings.
    """

    problems: tuple[Any, ...] = ()

    def __str__(self) -> str:
        # A message may quote a file, whose text could change the terminal.
        return printable(super().__str__())


class ConfigError(JaxloraError):
    """A run file, job or option is invalid."""


class ModelError(JaxloraError):
    """A model folder is incomplete, damaged, or of an unsupported kind."""


class DataError(JaxloraError):
    """A data file, or a record in it, is invalid."""


class AdapterError(JaxloraError):
    """A PEFT adapter folder cannot be read, or does not fit the base model."""


class CheckpointError(JaxloraError):
    """A checkpoint is missing, damaged, or belongs to other jobs or another base."""


class StorageError(JaxloraError, OSError):
    """A file or folder cannot be written; its previous contents are unchanged."""


class ProcessError(JaxloraError):
    """A run of several processes has failed, as one of them has ended."""


class DeviceError(JaxloraError):
    """A device has failed, or its memory is full."""


class FuseError(JaxloraError):
    """A function cannot be fused, or nothing in it can."""
