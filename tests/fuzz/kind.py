"""Describes one kind of input to the fuzz test."""

import dataclasses
import io
import pathlib
import random
from collections.abc import Callable

from rich.console import Console

from tests.fuzz.mutate import Damage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of input.

    Attributes:
        make: Writes whole, good inputs into an empty folder.
        targets: The files that are damaged, as patterns; one of them at a time.
        damage: How.
        read: Reads them from the folder with the library.
        num_cases: How many in a run of the tests marked `grid`.
        changes_folder: Whether reading writes into the folder.
        entries: What a file may become beside a file with other contents; nothing
            where the file only carries a text for the test.
    """

    make: Callable[[pathlib.Path], object]
    targets: tuple[str, ...]
    damage: Callable[[bytes, random.Random], Damage]
    read: Callable[[pathlib.Path], object]
    num_cases: int
    changes_folder: bool = False
    entries: tuple[str, ...] = ("folder", "missing", "loop", "dangling", "pipe")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)
