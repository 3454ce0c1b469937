"""Regular expressions from run files and adapter folders, within a budget of time.

They mean what PEFT means by them, Python's `re`, which has no time-out: an expression
such as `((a)+)+!` takes it time exponential in the length of a name. So `re` decides
which expressions there are, and `regex`, which can be timed, matches them.
"""

import functools
import re
import time
import warnings
from collections.abc import Callable

import regex

from jaxlora.errors import ConfigError

# Ordinary expressions take microseconds for all names of a model.
_SECONDS = 1.0
# `regex` writes repetitions out when it compiles: a{1000} nested four times would take
# all memory.
_MAX_SIZE = 100_000
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d+)(?:,\d*)?\}|.", re.DOTALL
)
# `[[:alpha:]]` is a class and `{e<=1}` allows errors in `regex`, and neither in `re`.
_OTHER_MEANING = re.compile(r"\[:|\{(?!\d*,?\d*\})")


class Patterns:
    """Matches expressions of one origin; all matches together have a time budget.

    The budget is of processor time, so that a machine that is busy refuses nothing.
    """

    def __init__(self, where: str, seconds: float = _SECONDS):
        """Starts with the whole budget.

        Args:
            where: What the expressions belong to, for errors.
            seconds: The budget.
        """
        self._where = where
        self._total = self._left = seconds

    def check(self, setting: str, expression: str, *, is_end: bool = False) -> None:
        """Checks that a string is a regular expression.

        Args:
            setting: What holds it, for the error.
            expression: The string.
            is_end: Whether it is for `ends` instead of `is_whole`.

        Raises:
            ConfigError: It is none.
        """
        try:
            _compiled(_name_end(expression) if is_end else expression)
        # The last three are for flags that exclude each other, repetitions beyond 32
        # bits and parentheses beyond the stack.
        except (
            re.error,
            regex.error,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ConfigError(
                f"{self._where}: {setting} {_cut(expression)} is no regular "
                f"expression: {error}."
            ) from None

    def is_whole(self, expression: str, name: str) -> bool:
        """Whether an expression matches a whole name, as PEFT's `target_modules` do.

        Raises:
            ConfigError: The budget is spent.
        """
        return self._match(regex.Pattern.fullmatch, expression, expression, name)

    def ends(self, expression: str, name: str) -> bool:
        """Whether an expression matches a name's end, as PEFT's `rank_pattern` does.

        Raises:
            ConfigError: The budget is spent.
        """
        return self._match(regex.Pattern.match, _name_end(expression), expression, name)

    def _match(self, match: Callable, compiled: str, given: str, name: str) -> bool:
        start = time.thread_time()
        try:
            if self._left <= 0:
                raise TimeoutError
            return match(_compiled(compiled), name, timeout=self._left) is not None
        except TimeoutError:
            self._left = 0.0
            raise ConfigError(
                f"{self._where}: {_cut(given)} takes longer than {self._total:g} s "
                "to match the modules' names. Repetitions inside repetitions, "
                "such as (a+)+, are the usual cause: write it without, or list the "
                "modules."
            ) from None
        finally:
            self._left -= time.thread_time() - start


def _name_end(expression: str) -> str:
    """The expression that PEFT makes of a key of a pattern."""
    return rf"(.*\.)?({expression})$"


@functools.lru_cache(maxsize=1024)
def _compiled(expression: str) -> regex.Pattern:
    if _written_out(expression) > _MAX_SIZE:
        raise re.error(f"written out, it has more than {_MAX_SIZE} parts")
    with warnings.catch_warnings():
        # Sets that a later Python may read in another way.
        warnings.simplefilter("ignore", FutureWarning)
        re.compile(expression)
        if found := _OTHER_MEANING.search(expression):
            raise re.error(f"{found[0]!r} has no place in the name of a module")
        return regex.compile(expression, regex.VERSION0)


def _written_out(expression: str) -> int:
    """About how many characters an expression has with its repetitions written out."""
    groups, last = [0], 0
    for token in _TOKEN.finditer(expression):
        if token["least"]:
            more = last * (max(1, int(token["least"])) - 1)
            groups[-1] += more
            last += more
        elif token[0] == "(":
            groups.append(0)
        elif token[0] == ")" and len(groups) > 1:
            last = groups.pop() + 1
            groups[-1] += last
        else:
            last = 1
            groups[-1] += 1
    return sum(groups)


def _cut(expression: str) -> str:
    return repr(expression if len(expression) <= 200 else f"{expression[:200]}...")
