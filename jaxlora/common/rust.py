"""Converts the panics of Rust libraries on damaged files to this library's errors."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

from jaxlora.common.json_file import cut
from jaxlora.errors import JaxloraError


@contextlib.contextmanager
def wrap_errors(where: str, cure: str, kind: type[JaxloraError]) -> Iterator[None]:
    """Raises `kind` for any error that the block raises, including panics.

    A panic is not an `Exception` in Python. Rust also prints it to standard error,
    which is suppressed here.

    Args:
        where: The file that the block reads, for the error.
        cure: What the user can do about it.
        kind: Class of the error. A `JaxloraError` passes unchanged.
    """
    with _stderr_without_panics():
        try:
            yield
        except (JaxloraError, MemoryError):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise kind(f"{where}: cannot be read ({cut(error)}). {cure}") from error


@contextlib.contextmanager
def wrap_panics(where: str, cure: str, kind: type[JaxloraError]) -> Iterator[None]:
    """Converts panics alone, which is cheaper than `wrap_errors`, for frequent calls.

    Only panics and the plain `Exception` of a Rust library become `kind`, and the text
    that Rust prints for a panic is not suppressed.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or _is_panic(error):
            raise kind(f"{where} failed ({cut(error)}). {cure}") from error
        raise


def _is_panic(error: BaseException | None) -> bool:
    # The class of panics cannot be imported.
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _stderr_without_panics() -> Iterator[None]:
    """Buffers standard error, and prints it at the end unless the block panics."""
    try:
        stderr = os.dup(2)
    except OSError:  # standard error is closed, so nothing can appear
        yield
        return
    has_panicked = False
    with tempfile.TemporaryFile() as held, os.fdopen(stderr, "wb") as shown:
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        except JaxloraError as error:
            has_panicked = _is_panic(error.__cause__)
            raise
        finally:
            os.dup2(shown.fileno(), 2)
            if not has_panicked:
                held.seek(0)
                shutil.copyfileobj(held, shown)
