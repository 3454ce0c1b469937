"""Matches regular expressions of run files and adapter folders, with a time limit.

As in PEFT, the expressions have the meaning of Python's `re`. But `re` has no timeout,
and an expression such as `((a)+)+!` takes time exponential in the length of a name. So
`re` decides which expressions are valid, and `regex`, which has a timeout, matches
them.
"""

import functools
import re
import time
import warnings
from collections.abc import Callable

import regex

from jaxlora.errors import ConfigError

# Time budget. Ordinary expressions take microseconds for all names of a model.
_SECONDS = 1.0
# `regex` expands repetitions when it compiles an expression, so a{1000} nested four
# times would exhaust the memory.
_MAX_SIZE = 100_000
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d+)(?:,\d*)?\}|.", re.DOTALL
)
# In `regex`, `[[:alpha:]]` is a class and `{e<=1}` allows errors, unlike in `re`.
_OTHER_MEANING = re.compile(r"\[:|\{(?!\d*,?\d*\})")


class Patterns:
    """Matches the expressions of one source within a common time budget.

    The budget is in processor time, so a busy machine causes no errors.
    """

    def __init__(self, where: str, seconds: float = _SECONDS):
        """Starts with the full budget.

        Args:
            where: Describes the source of the expressions in errors.
            seconds: Time budget.
        """
        self._where = where
        self._total = self._left = seconds

    def check(self, setting: str, expression: str, *, is_end: bool = False) -> None:
        """Checks that a string is a regular expression.

        Args:
            setting: Name of the setting that holds the string, for the error.
            expression: The string.
            is_end: Whether it is for `match_suffix` instead of `fullmatch`.

        Raises:
            ConfigError: The string is not a regular expression.
        """
        try:
            _compiled(_name_end(expression) if is_end else expression)
        # The last three are raised for conflicting flags, repetitions beyond 32
        # bits and parentheses beyond the stack.
        except (
            re.error,
            regex.error,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ConfigError(
                f"{self._where}: {setting} {_cut(expression)} is not a valid regular "
                f"expression: {error}."
            ) from None

    def fullmatch(self, expression: str, name: str) -> bool:
        """Whether an expression matches a complete name, as in PEFT's `target_modules`.

        Raises:
            ConfigError: The budget is spent.
        """
        return self._match(regex.Pattern.fullmatch, expression, expression, name)

    def match_suffix(self, expression: str, name: str) -> bool:
        """Whether an expression matches the end of a name, as in PEFT's `rank_pattern`.

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
                "to match the names of modules. The usual cause is a repetition inside "
                "a repetition, such as (a+)+. Write the expression without it, or list "
                "the modules."
            ) from None
        finally:
            self._left -= time.thread_time() - start


def _name_end(expression: str) -> str:
    """Returns the expression by which PEFT matches a pattern's key to a name."""
    return rf"(.*\.)?({expression})$"


@functools.lru_cache(maxsize=1024)
def _compiled(expression: str) -> regex.Pattern:
    if _written_out(expression) > _MAX_SIZE:
        raise re.error(f"written out, it has more than {_MAX_SIZE} parts")
    with warnings.catch_warnings():
        # The warning is that later versions of Python may interpret a set differently.
        warnings.simplefilter("ignore", FutureWarning)
        re.compile(expression)
        if found := _OTHER_MEANING.search(expression):
            raise re.error(f"{found[0]!r} cannot match the name of a module")
        return regex.compile(expression, regex.VERSION0)


def _written_out(expression: str) -> int:
    """Estimates the length of an expression with its repetitions expanded."""
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
