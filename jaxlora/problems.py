"""Problems of settings, and how they are written for users of YAML and of Python."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
# Validators put settings that a user is to write between these, as in YAML.
_QUOTED = re.compile(r"`([a-z_0-9]+): ([^`\s]+)`")
_YAML_VALUES = {"true": "True", "false": "False", "null": "None"}
_A_LIST = "expected a list: in brackets, or with '- ' before each item"
_NUMBER = "expected a number, without quotes, such as 8 or 2e-4"
_YAML_TYPES = {
    "missing": "this key is required",
    "tuple_type": _A_LIST,
    "list_type": _A_LIST,
    "model_type": "expected a mapping",
    "dict_type": "expected a mapping, such as {name: value}",
    "int_type": "expected a whole number, such as 8",
    "int_from_float": "expected a whole number, such as 8",
    "float_type": "expected a number, such as 8 or 2e-4",
    "bool_type": "expected true or false",
    "number": _NUMBER,
    "texts": "expected text, or a list of texts, such as [q_proj, v_proj]",
}
_PYTHON_TYPES = _YAML_TYPES | {
    "missing": "this argument is required",
    "tuple_type": "expected a list or tuple",
    "list_type": "expected a list",
    "model_type": "expected a dict",
    "dict_type": "expected a dict, such as {'name': value}",
    "number": "expected a number, such as 8 or 2e-4",
    "bool_type": "expected True or False",
    "texts": "expected a str, or a list of str, such as ['q_proj', 'v_proj']",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One setting that breaks a rule.

    Attributes:
        path: Keys and list indices that lead to the setting; empty: the whole.
        kind: Pydantic's name of the error, or a key of the tables above.
        text: The rule and the cure.
        given: The value; a list or mapping is not shown.
    """

    path: Path
    kind: str
    text: str
    given: Any

    def renamed(self, keys: Mapping[str, str]) -> "Problem":
        """Returns the problem with the key that the user gave for the setting."""
        if not self.path:
            return self
        first, *rest = self.path
        return dataclasses.replace(self, path=(keys.get(str(first), first), *rest))


def problem_of(path: Path, error: JaxloraError) -> Problem:
    """Returns an error as a problem of the setting that causes it."""
    return Problem(path=path, kind="input", text=str(error), given=())


def problems_of(found: pydantic.ValidationError) -> list[Problem]:
    """Returns the problems that pydantic has collected."""
    out = []
    for item in found.errors(include_url=False):
        parts = item["loc"]
        path = tuple(p for p in parts if not str(p).startswith("function-"))
        text = item["msg"].removeprefix("Value error, ")
        text = re.sub("^Input should be", "must be", text)
        out.append(
            Problem(path=path, kind=item["type"], text=text, given=item["input"])
        )
    return out


def validation_error(
    title: str, problems: Iterable[Problem]
) -> pydantic.ValidationError:
    """Returns pydantic's error for problems, which `problems_of` reads."""
    return pydantic.ValidationError.from_exception_data(
        title,
        [
            InitErrorDetails(
                # Braces in a format would be fields.
                type=PydanticCustomError(cast(Any, p.kind), "{text}", {"text": p.text}),
                loc=p.path,
                input=p.given,
            )
            for p in problems
        ],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PythonWords:
    """Words of Python.

    Attributes:
        what: Name of the function or class that was given the settings.
    """

    what: str

    def line(self, problem: Problem) -> str:
        """Returns the place, the rule, the cure and the given value."""
        path = ""
        for part in problem.path:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        text = _type_text(problem, _PYTHON_TYPES) or _in_python(problem.text)
        return _join(self.what, path.lstrip("."), text, problem.given, repr)


@dataclasses.dataclass(frozen=True, slots=True)
class YamlWords:
    """Words of a YAML file and of the command line.

    Attributes:
        where: The file, or the command.
        find_line: Returns the line of the file that holds a setting, if any.
        options: Argument of the command line, by the path of the setting it sets.
    """

    where: str
    find_line: Callable[[Path], int | None] = lambda path: None
    options: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    def line(self, problem: Problem) -> str:
        """Returns the place, the rule, the cure and the given value."""
        text = _type_text(problem, _YAML_TYPES) or without_quotes(problem.text)
        for end in range(len(problem.path), 0, -1):
            option = self.options.get(problem.path[:end])
            if option is not None:
                rest = ".".join(map(str, problem.path[end:]))
                return _join(option, rest, text, problem.given, _in_yaml)
        number = self.find_line(problem.path)
        where = self.where if number is None else f"{self.where}, line {number}"
        path = ".".join(map(str, problem.path))
        return _join(where, path, text, problem.given, _in_yaml)


# Writes problems in the words of the interface that the user has used.
Words = PythonWords | YamlWords


def format_problems(problems: Iterable[Problem], words: Words) -> str:
    """Writes one line for each problem."""
    return "\n".join(dict.fromkeys(words.line(problem) for problem in problems))


def format_errors(found: pydantic.ValidationError, where: str) -> str:
    """Formats one line per error of a file: the key, the reason, and the value."""
    return format_problems(problems_of(found), YamlWords(where))


def settings_error(problems: Iterable[Problem], words: Words) -> ConfigError:
    """Returns an error that lists problems, and carries them in its `problems`."""
    listed = tuple(problems)
    found = ConfigError(format_problems(listed, words))
    found.problems = listed
    return found


class Problems:
    """Collects errors about settings, so that a user sees all of them at once."""

    def __init__(self) -> None:
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
        problems = [problem_of(path, error) for path, error in self._errors]
        if len(problems) > 1:
            raise settings_error(problems, PythonWords("RunConfig"))
        for _, error in self._errors:
            error.problems = tuple(problems)
            raise error


def _type_text(problem: Problem, texts: Mapping[str, str]) -> str | None:
    """Describes what a value of the wrong type should have been.

    Returns:
        The description; None for problems that are not about types.
    """
    is_python = texts is _PYTHON_TYPES
    if problem.kind == "string_type":
        if isinstance(problem.given, list | tuple):
            return "expected one text, not a list"
        return "expected a str" if is_python else "expected text, in quotes if need be"
    if problem.kind == MAPPING:
        if is_python:
            return f"expected a dict, such as {{{problem.text!r}: ...}}"
        return f"expected a mapping, such as {{{problem.text}: ...}}"
    if problem.kind == UNKNOWN and is_python:
        text = _in_python(problem.text)
        return re.sub(r"\b(unknown|Known) key", r"\1 argument", text)
    return texts.get(problem.kind)


def _join(
    where: str, path: str, text: str, given: Any, show: Callable[[Any], str]
) -> str:
    shown = "" if _is_nested(given) else f" (given: {_shown(given, show)})"
    return f"{where}: {path + ': ' if path else ''}{text}{shown}"


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | pydantic.BaseModel)


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    try:
        return f"{show(value):.100}"
    except ValueError:  # an integer with more digits than Python prints
        return "a number with thousands of digits"


def _in_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "nothing" if value is None else repr(value)


def without_quotes(text: str) -> str:
    """Returns a text with the settings in it as YAML has them."""
    return _QUOTED.sub(r"\1: \2", text)


def _in_python(text: str) -> str:
    """Replaces settings as YAML has them by arguments of Python."""

    def argument(found: re.Match) -> str:
        name, value = found.groups()
        if value in _YAML_VALUES:
            return f"{name}={_YAML_VALUES[value]}"
        is_number = re.fullmatch(r"[0-9.e-]+", value)
        return f"{name}={value}" if is_number else f"{name}={value!r}"

    return _QUOTED.sub(argument, text)
