"""Functions that damage the bytes of a file, or a value in its contents."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Damage = tuple[str, bytes]  # in words, and the file afterwards

_DEPTH = 10_000
_DIGITS = 5_000
# JSON texts that json.dumps cannot write.
_TEXTS = {
    "@long number@": "9" * _DIGITS,
    "@long negative number@": "-" + "9" * _DIGITS,
    "@huge exponent@": "1e999",
    "@deep list@": "[" * _DEPTH + "]" * _DEPTH,
    "@deep object@": '{"a":' * _DEPTH + "1" + "}" * _DEPTH,
    "@open list@": "[" * _DEPTH,
}
ODD_VALUES: tuple[Any, ...] = (
    *_TEXTS,
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    0.5,
    -0.0,
    2**31,
    2**63,
    2**64,
    10**30,
    -(10**30),
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "0",
    "null",
    "nan",
    "\0",
    "\ud800",
    "\U0001f999",
    "\x1b[2J\x07\x9b2J",
    "\u202etxt.\u200b\u2066",
    "a\nmodel: b\n# c\r\u2028d",
    "a" * 100_000,
    "../../etc/passwd",
    "{{ x",
    "(",
    "(a+)+$",
    [],
    {},
    [[]],
    [None],
    ["a", 1],
    {"": None},
    {"a": {"b": []}},
    list(range(300)),
)
_ODD_BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\xc3",
    b"\r",
    b"\x1a",
    b"\x1b[2J",
    b"\xc2\x9b",
    b"\xe2\x80\xae",
    b"\n\n",
    b'"',
    b"'",
    b",",
    b":",
    b"{",
    b"}",
    b"NaN",
    b"-",
    b"\\ud800",
    b"!!python/object:os.system",
    b"&a [*a]",
    b"9" * _DIGITS,
    b"[" * _DEPTH,
    b'{"a":' * _DEPTH,
    b"x" * 100_000,
)


# ---- bytes ---------------------------------------------------------------------------


def flip(content: bytes, rng: random.Random) -> bytes:
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[_place(content, rng)] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(content: bytes, rng: random.Random) -> bytes:
    at, size = _place(content, rng), rng.choice((1, 4, 8))
    new = rng.choice((b"\0", b"\xff", bytes([rng.randrange(256)]))) * size
    return content[:at] + new + content[at + size :]


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: _place(content, rng)]


def duplicate(content: bytes, rng: random.Random) -> bytes:
    first, last = sorted((_place(content, rng), _place(content, rng)))
    return content[:last] + content[first:last] + content[last:]


def remove(content: bytes, rng: random.Random) -> bytes:
    at = _place(content, rng)
    return content[:at] + content[at + rng.choice((1, 2, 7, 40)) :]


def insert(content: bytes, rng: random.Random) -> bytes:
    at = _place(content, rng)
    return content[:at] + rng.choice(_ODD_BYTES) + content[at:]


def swap(content: bytes, rng: random.Random) -> bytes:
    size = rng.randrange(1, 20)
    first, second = sorted((_place(content, rng), _place(content, rng)))
    if second < first + size:
        return content[::-1]
    one, other = content[first : first + size], content[second : second + size]
    between = content[first + size : second]
    return content[:first] + other + between + one + content[second + size :]


def replace(content: bytes, rng: random.Random) -> bytes:
    """Replaces the complete contents."""
    text = content.decode("latin-1")
    return rng.choice(
        (
            b"",
            b"\n",
            b"null",
            b"[]",
            b"{}",
            b"0",
            b"NaN",
            b'"text"',
            b"\0" * len(content),
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            b"<!DOCTYPE html><html></html>",
            text.encode("utf-16"),
            b"\xef\xbb\xbf" + content,
            content + content,
            *(_TEXTS[key].encode() for key in _TEXTS),
        )
    )


_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip,
    flip,
    overwrite,
    truncate,
    duplicate,
    remove,
    insert,
    insert,
    swap,
    replace,
)


def _place(content: bytes, rng: random.Random) -> int:
    """Chooses a position; half of them are near the start or end, as headers are."""
    if not content:
        return 0
    near = min(len(content), 200)
    where = rng.random()
    if where < 0.3:
        return rng.randrange(near)
    if where < 0.45:
        return len(content) - 1 - rng.randrange(near)
    return rng.randrange(len(content))


def damage_bytes(content: bytes, rng: random.Random) -> Damage:
    """Changes some bytes, whatever they mean."""
    function = rng.choice(_BYTES)
    if not content:
        function = insert
    return function.__name__, function(content, rng)


# ---- values --------------------------------------------------------------------------


def damage_value(value: Any, rng: random.Random) -> tuple[str, Any]:
    """Changes something at a random place of a JSON value; returns what, and the new.

    Values from `ODD_VALUES` may be keys of texts that `to_json` puts in their place.
    """
    value = copy.deepcopy(value)
    places = list(_places(value, ()))
    path = rng.choice(places)
    if not path:
        odd = rng.choice(ODD_VALUES)
        return f"all is {odd!r:.40}", copy.deepcopy(odd)
    holder, key = value, path[-1]
    for part in path[:-1]:
        holder = holder[part]
    where = ".".join(map(str, path))
    what = rng.choice(("set", "set", "set", "remove", "rename", "swap", "wrap"))
    if what == "remove":
        del holder[key]
    elif what == "rename" and isinstance(holder, dict):
        new = rng.choice((f"{key}x", "", key.upper(), "\0", "\ud800", "a" * 10_000))
        holder[new] = holder.pop(key)
        return f"rename {where} to {new!r:.40}", value
    elif what == "swap":
        other = rng.choice(list(holder) if isinstance(holder, dict) else [0])
        holder[key], holder[other] = holder[other], holder[key]
        return f"swap {where} and {other}", value
    elif what == "wrap":
        holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        return f"set {where} to {holder[key]!r:.40}", value
    return f"{what} {where}", value


def _places(value: Any, path: tuple) -> Any:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 50)):
            yield from _places(value[i], (*path, i))


def to_json(value: Any) -> bytes:
    """Writes JSON text, also of values that json.dumps cannot write."""
    text = json.dumps(value)
    for key, odd in _TEXTS.items():
        text = text.replace(json.dumps(key), odd)
    return text.encode()


def damage_json(content: bytes, rng: random.Random) -> Damage:
    """Changes a value of a JSON file, or its bytes."""
    if rng.random() < 0.35:
        return damage_bytes(content, rng)
    what, value = damage_value(json.loads(content), rng)
    return what, to_json(value)


def damage_lines(content: bytes, rng: random.Random) -> Damage:
    """Changes a value in one line of a file with JSON lines, or its bytes."""
    if rng.random() < 0.35:
        return damage_bytes(content, rng)
    lines = content.splitlines()
    number = rng.randrange(min(3, len(lines)))
    what, value = damage_value(json.loads(lines[number]), rng)
    lines[number] = to_json(value)
    return f"line {number + 1}: {what}", b"\n".join(lines)


# ---- other formats -------------------------------------------------------------------


def damage_safetensors(content: bytes, rng: random.Random) -> Damage:
    """Changes a value of the header and updates its length, or changes bytes."""
    if rng.random() < 0.5:
        return damage_bytes(content, rng)
    size = int.from_bytes(content[:8], "little")
    what, value = damage_value(json.loads(content[8 : 8 + size]), rng)
    header = to_json(value)
    return what, len(header).to_bytes(8, "little") + header + content[8 + size :]


_SNIPPETS = (
    "{{ messages[0].__class__ }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ messages | tojson }}",
    "{{ raise_exception('no') }}",
    "{% set x = [] %}{% for i in range(99999) %}{{ x.append(i) }}{% endfor %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ undefined_function() }}",
    "{{ messages.a.b.c }}",
    "{{ 1 / 0 }}",
    "{{ 1 << 99999999999 }}",
    "{{ (9 ** 9) ** 99999 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ ['a'] * 999999999 }}",
    "{{ messages | batch(1) | list | length }}",
    "{{ lipsum(n=99999) }}",
    "{{ strftime_now('%Y' * 999) }}",
    "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ cycler() }}",
    "{{ namespace(a=1).a }}",
    "{{ self }}",
    "{{ '\\ud800' }}",
    "{" * 300,
    "{{ " + "(" * 400 + ")" * 400 + " }}",
    "{{ " + "not " * 5000 + "x }}",
    "{{ " + "9" * _DIGITS + " }}",
    "{% if x %}" * 300,
)


def damage_template(content: bytes, rng: random.Random) -> Damage:
    """Puts a hostile piece into a Jinja template, or changes its bytes."""
    if rng.random() < 0.6:
        return damage_bytes(content, rng)
    at, snippet = _place(content, rng), rng.choice(_SNIPPETS).encode()
    if rng.random() < 0.3:
        return f"only {snippet!r:.60}", snippet
    return f"insert {snippet!r:.60}", content[:at] + snippet + content[at:]


_PIECES = (
    *"()[]{}*+?|^$.\\-,",
    "(a+)+",
    "(.*)*",
    "(.*.*)+",
    r"(\w+\.?)+x",
    r"(\w|\w\w|.)*!",
    ".*.*.*.*.*.*.*.*.*!",
    "(?:" * 50,
    "(" * 5000,
    "a{99999}",
    "(a{999}){999}",
    "a{99999999999}",
    "[^",
    r"\1",
    "(?P<n>x)(?P<n>y)",
    "(?<=a+)",
    "(?R)",
    "(?i)",
    "\0",
    "\ud800",
    "q_proj",
    "|" * 1000,
)


def damage_regex(expression: str, rng: random.Random) -> str:
    """Puts pieces, also of catastrophic expressions, into a regular expression."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(expression) + 1)
        kept = expression[at + rng.choice((0, 0, 1, 5)) :]
        expression = expression[:at] + rng.choice(_PIECES) + kept
    return expression
