"""Parses YAML by the core schema of YAML 1.2.

In this schema, `on` and `1:30` are strings, and `2e-4` is a number.

In addition to the core schema, `<<` merges mappings, as in YAML 1.1.
"""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from jaxlora.errors import ConfigError
from jaxlora.printable import has_invisible, printable

# Without this limit, aliases of aliases could make a small file arbitrarily large.
_MOST_VALUES = 1_000_000
_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_BASES = {"0o": 8, "0x": 16}
_PLAIN = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}


class _Composer(yaml.SafeLoader):
    """Determines the type of a plain scalar by the core schema."""

    yaml_implicit_resolvers: dict = {}


for _kind, _pattern in (*_PLAIN.items(), ("merge", re.compile("<<"))):
    _whole = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Composer.add_implicit_resolver(_TAG + _kind, _whole, None)


def parse_yaml(text: str, where: str, *, any_keys: bool = False) -> Any:
    """Parses one YAML document.

    Args:
        text: The document.
        where: Describes the document in errors.
        any_keys: Whether keys that are numbers or truth values are read as texts, as
            files of other tools have them.

    Raises:
        ConfigError: The text is not YAML, a key is a duplicate or not a string, or the
            document is nested too deeply or too large. The message names the line.
    """
    try:
        root = yaml.compose(text, Loader=_Composer)
        if root is None:
            return None
        return _Constructor(where, any_keys=any_keys).value(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explain(error, where)) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: cannot be read as YAML: {reason}") from error
    except RecursionError:
        raise ConfigError(
            f"{where}: cannot be read as YAML: lists and mappings are nested too deep."
        ) from None


def line_finder(text: str) -> Callable[[Sequence[int | str]], int | None]:
    """Returns a function that finds lines in a document that `parse_yaml` reads.

    The document is parsed again when the function is called first. The function takes
    the keys and list indices that lead to a value. It returns the line of the innermost
    part of the path that exists, from 1; None if not even the first key exists.
    """

    @functools.cache
    def read() -> tuple[Any, _Constructor]:
        constructor = _Constructor("")
        root = yaml.compose(text, Loader=_Composer)
        return None if root is None else constructor.value(root), constructor

    def find(path: Sequence[int | str]) -> int | None:
        value, constructor = read()
        line = None
        for part in path:
            try:
                line, value = constructor.lines[id(value)][part], value[part]
            except (LookupError, TypeError):
                break
        return line

    return find


def dump_yaml(values: Any) -> str:
    """Returns JSON values as YAML, which `parse_yaml` reads as the same values.

    Control and invisible characters are escaped, so the text can be printed.
    """
    # Texts with such characters are in double quotes, where YAML reads these escapes.
    return printable(
        yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    )


# libyaml's writes the same text in a third of the time, where PyYAML has it.
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):
    """Quotes texts that YAML 1.2 would read as other values, and no others."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        is_other_value = any(pattern.fullmatch(text) for pattern in _PLAIN.values())
        if is_other_value or has_invisible(text.replace("\n", "")):
            style = '"'
        return self.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _explain(error: yaml.MarkedYAMLError, where: str) -> str:
    mark = error.problem_mark or error.context_mark
    place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    problem = ", ".join(filter(None, (error.context, error.problem)))
    cures = {
        "'\\t'": "Indent with spaces, not tabs.",
        "but found another document": "Keep one document: remove the line ---.",
    }
    cure = next(
        (text for sign, text in cures.items() if sign in problem), "Correct that line."
    )
    return f"{where}{place}: cannot be read as YAML: {problem}. {cure}"


class _Constructor:
    """Makes Python values from YAML nodes.

    Attributes:
        lines: Line of each part of a list or mapping, by the identity of that.
    """

    def __init__(self, where: str, *, any_keys: bool = False):
        self._any_keys = any_keys
        self._where = where
        self._values: dict[yaml.Node, Any] = {}
        self._sizes: dict[yaml.Node, int] = {}
        self.lines: dict[int, Any] = {}

    def value(self, node: yaml.Node) -> Any:
        """Returns the value of a node; an alias has the value of its anchor."""
        if node in self._sizes and node not in self._values:
            raise self._error(node, "an alias refers to a value that contains it")
        if node not in self._values:
            self._sizes[node] = 1
            self._values[node] = self._construct(node)
        return self._values[node]

    def _construct(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            items = [self._part(node, item) for item in node.value]
            self.lines[id(items)] = [item.start_mark.line + 1 for item in node.value]
            return items
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node)
        if not isinstance(node, yaml.ScalarNode) or kind not in ("str", *_PLAIN):
            raise self._error(node, f"the tag {kind!r} is not supported. Remove it")
        if kind == "str":
            return node.value
        if not _PLAIN[kind].fullmatch(node.value):
            raise self._error(node, f"{node.value!r:.80} is not of type {kind}")
        return self._scalar(node, kind)

    def _scalar(self, node: yaml.ScalarNode, kind: str) -> Any:
        text = node.value
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "float":
            return float(re.sub(r"\.(?=[in])", "", text.lower()))
        try:
            value = int(text, _BASES.get(text[:2], 10))
            str(value)  # Python has a limit to what it prints, in any base
        except ValueError:
            limit = sys.get_int_max_str_digits()
            reason = f"a number has more than {limit} digits"
            raise self._error(node, reason) from None
        return value

    def _part(self, whole: yaml.Node, part: yaml.Node) -> Any:
        """Returns the value of a part, and adds its size to that of its parent."""
        value = self.value(part)
        self._sizes[whole] += self._sizes[part]
        if self._sizes[whole] > _MOST_VALUES:
            reason = f"aliases expand it to more than {_MOST_VALUES:,} values"
            raise self._error(whole, reason)
        return value

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        merged: list[Any] = []
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            is_merge = key_node.tag == _MERGE
            key = "<<" if is_merge else self.value(key_node)
            if self._any_keys and isinstance(key, int | float):
                key = str(key_node.value)
            if not isinstance(key, str):
                reason = f"the key {key!r:.80} is not a string. Put it in quotes"
                raise self._error(key_node, reason)
            if key in lines:
                reason = f"the key {key!r} is also in line {lines[key]}. Keep one"
                raise self._error(key_node, reason)
            lines[key] = key_node.start_mark.line + 1
            value = self._part(node, value_node)
            if not is_merge:
                own[key] = value
                continue
            merged = value if isinstance(value, list) else [value]
            if not all(isinstance(source, dict) for source in merged):
                reason = "<< merges a mapping or a list of mappings, and nothing else"
                raise self._error(value_node, reason)
        values: dict[str, Any] = {}
        all_lines: dict[str, int] = {}
        for source in reversed(merged):  # of duplicate keys, the first one counts
            values |= source
            all_lines |= self.lines[id(source)]
        values |= own
        self.lines[id(values)] = all_lines | lines
        return values

    def _error(self, node: yaml.Node, reason: str) -> ConfigError:
        mark = node.start_mark
        return ConfigError(
            f"{self._where}, line {mark.line + 1}, column {mark.column + 1}: cannot be "
            f"read as YAML: {reason}."
        )
