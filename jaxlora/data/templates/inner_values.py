"""Lists and objects in records, which a template over fields may not print as a whole.

They would be printed in Python's notation, such as `{'text': ['t']}`, which no model
should learn. This runs in the process of `template_worker`, too.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

_TEXT_KEYS = (".content", ".text", ".value")


def _expressions(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields a value and all values within it, each with its Jinja expression.

    Args:
        name: The expression of the value, such as the name of a field.
        value: The value.
    """
    waiting = collections.deque([(name, value)])
    while waiting:
        name, value = waiting.popleft()
        yield name, value
        waiting += _items(name, value)


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return []
    # Jinja reads `x.items` as the method of a dict.
    is_plain = lambda k: isinstance(k, str) and k.isidentifier() and not hasattr({}, k)
    return [
        (f"{name}.{key}" if is_plain(key) else f"{name}[{key!r}]", item)
        for key, item in value.items()
    ]


def find_text(name: str, value: Any) -> str | None:
    """Returns the expression of the first text or number within a value, or None.

    Args:
        name: The expression of the value.
        value: The value.
    """
    found = list(_expressions(name, value))
    texts = [inner for inner, item in found if isinstance(item, str)]
    # The other texts of a message, such as its role, say what kind it is.
    texts.sort(key=lambda inner: not inner.endswith(_TEXT_KEYS))
    numbers = [inner for inner, item in found if isinstance(item, int | float)]
    return next(iter(texts + numbers), None)


class NotTextError(Exception):
    """A template prints what is no text."""


class _Unprintable:
    """A list or an object that cannot become text.

    Attributes:
        name: Its Jinja expression.
    """

    name = ""

    def __str__(self) -> str:
        _refuse(self.name, self)

    def __repr__(self) -> str:
        _refuse(self.name, self)


class _Object(_Unprintable, dict):
    pass


class _List(_Unprintable, list):
    pass


# Jinja's errors name the types of values.
for _made, _name in ((_Object, "dict"), (_List, "list")):
    _made.__name__, _made.__module__ = _name, "builtins"


def unprintable(name: str, value: Any) -> Any:
    """Returns a value whose lists and objects, at any depth, raise if they are printed.

    Args:
        name: The Jinja expression of the value.
        value: The value, of a record.
    """
    items = _items(name, value)
    if isinstance(value, Mapping):
        inner = (unprintable(*item) for item in items)
        made: Any = _Object(zip(value, inner, strict=True))
    elif isinstance(value, list | tuple):
        made = _List(unprintable(*item) for item in items)
    else:
        return value
    made.name = name
    return made


def check_printed(value: Any) -> Any:
    """Returns a value that a template prints.

    Raises:
        NotTextError: Its text is Python's notation.
    """
    if callable(value):
        name = getattr(value, "__name__", "x")
        raise NotTextError(
            f"a value in {{{{ }}}} is the function {name!r}, not text; call it, or, if "
            f"it is the field of an object, write {{{{ x[{name!r}] }}}}"
        )
    if isinstance(value, Iterable) and not isinstance(value, str):
        _refuse(getattr(value, "name", ""), value)
    return value


def _refuse(name: str, value: Any) -> NoReturn:
    what = f"of type {type(value).__name__}"
    for kind, word in ((Mapping, "an object"), (list, "a list"), (bytes, "binary")):
        what = word if isinstance(value, kind) else what
    if not name:
        raise NotTextError(f"a value in {{{{ }}}} is {what}, not text")
    cures = [f"{{{{ {name} | tojson }}}}"]
    if inner := find_text(name, value):
        cures.insert(0, f"{{{{ {inner} }}}}")
    raise NotTextError(f"{name} is {what}, not text; write {' or '.join(cures)}")
