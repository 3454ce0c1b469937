"""Libraries in Rust, which may panic on a damaged file, with their panics as errors."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

from jaxlora.errors import JaxloraError
from jaxlora.json_file import cut


@contextlib.contextmanager
def explaining(where: str, cure: str, kind: type[JaxloraError]) -> Iterator[None]:
    """Raises `kind` for whatever the block raises, panics included.

    A panic is no `Exception` in Python, and Rust prints it to the process's standard
    error as well, which is held back here.

    Args:
        where: The file that the block reads, for the error.
        cure: What to do about it.
        kind: What to raise. Errors of ours pass as they are.
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
def explaining_panics(
    where: str, cure: str, kind: type[JaxloraError]
) -> Iterator[None]:
    """As `explaining`, for the many calls of a hot path.

    Only panics and the plain `Exception` of a Rust library become `kind`, and what Rust
    prints of a panic shows.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or _is_panic(error):
            raise kind(f"{where} failed ({cut(error)}). {cure}") from error
        raise


def _is_panic(error: BaseException | None) -> bool:
    # The class has no name that could be imported.
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _stderr_without_panics() -> Iterator[None]:
    """Holds standard error back, and shows it at the end unless the block panics."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed, so that nothing can show
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
