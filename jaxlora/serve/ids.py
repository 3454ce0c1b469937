"""Ids of what an engine makes. They tell which engine of a fleet has it.

An id of engine 0 has 32 hexadecimal digits, and one of engine 3 begins with `e3-`. So
the things of a server with one GPU are those of engine 0 when it gets more.
"""

import dataclasses
import re
import secrets

import sqlalchemy as sa

from jaxlora.errors import JaxloraError

LENGTH = 32
_MARK = re.compile(r"e([1-9]\d?)-[0-9a-f]")
_PIECES = 2**48  # numbers of pieces of work of an engine


class Misdirected(JaxloraError):
    """Another engine has what a request is about."""


def engine_of(id: str) -> int:
    """Returns the number of the engine that has made an id, or what begins with one."""
    match = _MARK.match(id)
    return 0 if match is None else int(match[1])


@dataclasses.dataclass(frozen=True)
class Ids:
    """Makes the ids of an engine, and knows them.

    Attributes:
        engine: Number of the engine among all that use its database.
    """

    engine: int = 0

    @property
    def _prefix(self) -> str:
        return f"e{self.engine}-" if self.engine else ""

    def new(self) -> str:
        """Returns an id, which has 108 random bits at least."""
        digits = secrets.token_hex(LENGTH // 2)
        return (self._prefix + digits)[:LENGTH]

    def check(self, id: str) -> None:
        """Checks that an id is one of this engine.

        Raises:
            Misdirected: It is another's.
        """
        if (other := engine_of(id)) != self.engine:
            raise Misdirected(
                f"{id:.100} lives on engine {other}, and this is engine {self.engine}. "
                "If the server has fewer engines than before, raise engines, or load "
                "what was saved in a new session."
            )

    def are_in(self, column: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
        """Returns the condition that a column has ids of this engine."""
        if self.engine:
            return column.like(f"{self._prefix}%")
        # Not `e%-%`, which an id with an ending is like: `e0...-reference`.
        return sa.and_(column.not_like("e_-%"), column.not_like("e__-%"))

    @property
    def pieces(self) -> range:
        """The numbers of this engine's pieces of work."""
        return range(self.engine * _PIECES, (self.engine + 1) * _PIECES)


ONLY = Ids()  # of a server with one engine
