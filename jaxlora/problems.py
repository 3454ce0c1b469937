"""Problems of settings, and how errors describe them."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import pydantic
from pydantic_core import InitErrorDetails, PydanticCustomError

from jaxlora.errors import ConfigError, JaxloraError

Path = tuple[int | str, ...]

# Types of errors that pydantic does not have: a rule between several settings, a key
# that is unknown, and a value that is no mapping.
RULE = "rule"
UNKNOWN = "unknown"
MAPPING = "mapping"
# A setting at the beginning of an error.
_NAMED = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): ")
# Names of members of unions in the paths of pydantic.
_MEMBER = re.compile(r"(int|float|str|bool)$|[a-z]+\[|(constrained|function)-")
_A_LIST = "expected a list, such as [a, b]"
# Expected types, in words that users of YAML and of Python read alike.
_TYPES = {
    "missing": "this key is required",
    "tuple_type": _A_LIST,
    "list_type": _A_LIST,
    "model_type": "expected a mapping",
    "dict_type": "expected a mapping, such as {name: value}",
    "int_type": "expected a whole number, such as 8",
    "int_from_float": "expected a whole number, such as 8",
    "int_parsing_size": "expected a smaller whole number",
    "float_type": "expected a number, such as 8 or 2e-4",
    "bool_type": "expected true or false",
    "number": "expected a number, without quotes, such as 8 or 2e-4",
    "too_short": "the list is empty. Give at least one",
    "string_too_short": "expected text that is not empty",
    "string_type": "expected text, in quotes if need be",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One setting that breaks a rule.

    Attributes:
        path: Keys and list indices that lead to the setting; empty: the whole.
        text: The rule and the cure.
        kind: Pydantic's name of the error, or one of those above.
        given: The value; a list or mapping is not shown.
        others: (kind, text) of the other forms that the setting may have, none of which
            the value has either.
    """

    path: Path
    text: str
    kind: str = RULE
    given: Any = ()
    others: tuple[tuple[str, str], ...] = ()


def problem_of(
    path: Path, error: JaxloraError, settings: Collection[str] = ()
) -> Problem:
    """Returns an error as a problem of the setting that causes it.

    Args:
        path: The setting that was being checked.
        error: Its text may begin with the setting that it is about, as that may be
            another one: `objective_args: ` while `objective` was being checked.
        settings: Settings of the run, any of which may be wrong if its model is.
    """
    text = str(error)
    found = _NAMED.match(text)
    named = tuple(found[1].split(".")) if found else ("",)
    where: Path = ()
    if named[0] in path:
        longer = *path[: path.index(named[0])], *named
        where = max(path, longer, key=len)
    elif path[-1:] and named[0] == f"{path[-1]}_args":
        where = *path[:-1], *named
    elif path == ("model",) and named[0] in settings:
        where = named
    if found and where:
        path, text = where, text[found.end() :]
    return Problem(path=path, kind="input", text=text)


def problems_of(
    found: pydantic.ValidationError, given: Mapping[str, Any] | None = None
) -> list[Problem]:
    """Returns the problems that pydantic has collected, one for each value.

    Args:
        found: The error.
        given: The settings that were checked; None: paths hold no members of unions.
    """
    out: dict[Path, Problem] = {}
    for number, item in enumerate(found.errors(include_url=False)):
        path, is_of_union = tuple(item["loc"]), False
        if given is not None:
            path, is_of_union = _without_members(path, given)
        text = item["msg"].removeprefix("Value error, ")
        text = re.sub("^Input should be", "must be", text)
        text = re.sub("^Exceeds the limit .*", "expected a smaller number", text)
        others = item.get("ctx", {}).get("others", ())
        one = Problem(
            path=path, kind=item["type"], text=text, given=item["input"], others=others
        )
        if is_of_union and (first := out.get(path)) is not None:
            more = *first.others, (one.kind, one.text)
            out[path] = dataclasses.replace(first, others=more)
        else:
            out[path if is_of_union else (*path, "", number)] = one
    # Where a list or a mapping has problems within it, it need be nothing else.
    within = {p.path[:i] for p in out.values() for i in range(len(p.path))}
    return [one for key, one in out.items() if key != one.path or key not in within]


def _without_members(path: Path, given: Any) -> tuple[Path, bool]:
    """Leaves out the names that pydantic gives to members of unions, such as `float`.

    Args:
        path: A path of an error.
        given: What it leads through, as far as that is known: a mapping may have keys
            that are called like a member.

    Returns:
        The path, and whether it ends at a member of a union.
    """
    out: list[int | str] = []
    is_member = False
    for part in path:
        is_key = isinstance(given, dict) and part in given
        is_member = not is_key and _MEMBER.match(str(part)) is not None
        if is_member or part == "[key]":
            continue
        out.append(part)
        try:
            given = given[part]
        except (LookupError, TypeError):
            given = None
    return tuple(out), is_member


def validation_error(
    title: str, problems: Iterable[Problem]
) -> pydantic.ValidationError:
    """Returns pydantic's error for problems, which `problems_of` reads."""
    return pydantic.ValidationError.from_exception_data(
        title,
        [
            InitErrorDetails(
                # Braces in a format would be fields.
                type=PydanticCustomError(
                    cast(Any, p.kind), "{text}", {"text": p.text, "others": p.others}
                ),
                loc=p.path,
                input=p.given,
            )
            for p in problems
        ],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The place where a user gave settings: a file, a command, or a class of Python.

    Attributes:
        where: The file, the command or the class.
        find_line: Returns the line of the file that holds a setting, if any.
        options: Argument of the command line, by the path of the setting it sets.
    """

    where: str
    find_line: Callable[[Path], int | None] = lambda path: None
    options: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    def describe(self, problem: Problem) -> str:
        """Returns the place, the rule, the cure and the given value."""
        path, given = problem.path, problem.given
        for end in range(len(path), 0, -1):
            if (where := self.options.get(path[:end])) is not None:
                path = path[end:]
                break
        else:
            line = self.find_line(path)
            where = self.where if line is None else f"{self.where}, line {line}"
        key = f"{'.'.join(map(str, path))}: " if path else ""
        is_nested = isinstance(given, dict | list | tuple | pydantic.BaseModel)
        shown = "" if is_nested else f" (given: {_shown(given)})"
        return f"{where}: {key}{_text(problem)}{shown}"


_MOST_LINES = 50


def format_problems(problems: Iterable[Problem], source: Source) -> str:
    """Writes one line for each of the first problems, and the number of the others."""
    rest = iter(problems)
    lines: dict[str, None] = {}
    for problem in rest:
        lines[source.describe(problem)] = None
        if len(lines) == _MOST_LINES:
            break
    num_left = sum(1 for _ in rest)
    more = [f"and {num_left} more"] if num_left else []
    return "\n".join([*lines, *more])


def format_errors(found: pydantic.ValidationError, where: str) -> str:
    """Formats one line per error of a file: the key, the reason, and the value."""
    return format_problems(problems_of(found), Source(where))


def settings_error(problems: Iterable[Problem], source: Source) -> ConfigError:
    """Returns an error that lists problems, and carries them in its `problems`."""
    listed = tuple(problems)
    found = ConfigError(format_problems(listed, source))
    found.problems = listed
    return found


class Problems:
    """Collects errors about settings, so that a user sees all of them at once."""

    def __init__(self, settings: Collection[str] = ()) -> None:
        """Makes the object; there are no problems.

        Args:
            settings: Settings of the run, any of which may be wrong if its model is.
        """
        self._settings = settings
        self._errors: list[tuple[Path, JaxloraError]] = []

    def add(self, path: Path, error: JaxloraError) -> None:
        self._errors.append((path, error))

    @contextlib.contextmanager
    def at(self, *path: int | str) -> Iterator[None]:
        """Collects the error of a block, as a problem of the setting at this path."""
        try:
            yield
        except JaxloraError as error:
            self.add(path, error)

    def has(self, *path: int | str) -> bool:
        """Whether there is a problem at this path or below it."""
        return any(found[: len(path)] == path for found, _ in self._errors)

    def raise_all(self) -> None:
        """Raises what was collected; a single error keeps its type and message."""
        problems = [problem_of(*one, self._settings) for one in self._errors]
        if len(problems) > 1:
            raise settings_error(problems, Source("RunConfig"))
        for _, error in self._errors:
            error.problems = tuple(problems)
            raise error


def _text(problem: Problem) -> str:
    """Describes what a value should have been, in each of the forms it may have."""
    forms = [(problem.kind, problem.text), *problem.others]
    found = [_form(kind, text, problem.given) for kind, text in forms]
    return "; or ".join(dict.fromkeys(found))


def _form(kind: str, text: str, given: Any) -> str:
    if kind == "string_type" and isinstance(given, list | tuple):
        return "expected one text, not a list"
    if kind == MAPPING:
        return f"expected a mapping, such as {{{text}: ...}}"
    return _TYPES.get(kind, text)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    try:
        return f"{value!r:.100}"
    except ValueError:  # an integer with more digits than Python prints
        return "a number with thousands of digits"
