"""Errors that the user can correct. Each is a ValueError whose text is a sentence."""


class JaxloraError(ValueError):
    """The user's input is wrong; the text says what is wrong and how to correct it."""

    def __str__(self) -> str:
        # A damaged file may hold a lone surrogate, which no terminal can print.
        return super().__str__().encode("utf-8", "backslashreplace").decode()


class ConfigError(JaxloraError):
    """A run file, job or option cannot be used as given."""


class ModelError(JaxloraError):
    """A model folder is missing something, is damaged, or is of an unknown kind."""


class DataError(JaxloraError):
    """A data file or a record in it cannot be used."""


class AdapterError(JaxloraError):
    """A PEFT adapter folder cannot be read, or does not fit the base model."""


class CheckpointError(JaxloraError):
    """A checkpoint is missing, damaged, or belongs to other jobs or another base."""


class StorageError(JaxloraError, OSError):
    """A file or folder cannot be written; what was there before is unchanged."""
