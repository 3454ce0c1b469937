"""YAML 1.2: what a plain text stands for, and what is refused."""

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.common.yaml_file import dump_yaml, parse_yaml
from jaxlora.errors import ConfigError


def parse(text):
    return parse_yaml(text, "run.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"), ("Yes", "Yes"), ("n", "n"), ("1:30", "1:30"), ("1_000", "1_000"),
        ("0b11", "0b11"), ("2020-01-01", "2020-01-01"), ("=", "="), ("0x", "0x"),
        ("true", True), ("FALSE", False), ("~", None), ("null", None), ("", None),
        ("2e-4", 2e-4), ("+1E3", 1000.0), ("1.", 1.0), (".5", 0.5), ("12", 12),
        ("-.inf", -math.inf), ("-3", -3), ("017", 17), ("0o17", 15), ("0x1F", 31),
        ("'12'", "12"), ("!!int '12'", 12), ("!!str 12", "12"), ("!!float 3", 3.0),
        ("[1, a, {b: on}]", [1, "a", {"b": "on"}]),
    ],
)  # fmt: skip
def test_core_schema(text, value):
    found = parse(f"key: {text}")["key"]
    assert found == value and type(found) is type(value)


def test_not_a_number():
    assert math.isnan(parse("a: .NaN")["a"])


def test_an_empty_file_is_nothing():
    assert parse("") is None and parse("---\n...") is None


def test_merge_keys():
    text = "a: &a {x: 1, y: 2}\nb: &b {x: 3, z: 4}\n"
    assert parse(text + "c: {<<: *a, y: 5}")["c"] == {"x": 1, "y": 5}
    assert parse(text + "c: {<<: [*a, *b]}")["c"] == {"x": 1, "y": 2, "z": 4}
    with pytest.raises(ConfigError, match=r"line 3, column 9: .*<< merges a mapping"):
        parse(text + "c: {<<: 3}")


LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "a: 1\nb: 2\na: 3",
            "line 3, column 1: .* key 'a' is also in line 1. Keep one",
        ),
        ("{a: 1, 'a': 2}", "the key 'a' is also in line 1"),
        ("a: {<<: {x: 1}, <<: {y: 1}}", "the key '<<' is also in line 1"),
        ("1: a", "line 1, column 1: .*the key 1 is not a string. Put it in quotes"),
        ("true: a", "the key True is not a string"),
        ("? [a]\n: 1", r"the key \['a'\] is not a string"),
        ("a: 1\n---\nb: 2", "line 2, .*another document. Keep one document"),
        ("a: 1\n\tb: 2", "line 2, column 1: .*Indent with spaces, not tabs"),
        (
            "a: &a [*a]",
            "line 1, column 4: .*an alias refers to a value that",
        ),
        ("a: *b", "undefined alias 'b'"),
        (LAUGHS, "line 7, .*aliases expand it to more than 1,000,000 values"),
        ("a: " + "9" * 5000, "a number has more than 4300 digits"),
        ("a: " + "[" * 5000, "nested too deep"),
        ("a:\n" + "\n".join(" " * i + "- " for i in range(2000)), "nested too deep"),
        ("a: !!int x", "'x' is not of type int"),
        ("a: !!timestamp x", "the tag 'timestamp' is not supported"),
        (
            "a: !!python/name:os.system",
            "the tag 'python/name:os.system' is not",
        ),
        ("a: !!map x", "the tag 'map' is not supported"),
        ("a: !x 1", "the tag '!x' is not supported"),
        ("a: \0", "special characters are not allowed"),
        ("a: 'x", "line 1, column 6: .*end of stream"),
    ],
)
def test_refused(text, match):
    with pytest.raises(ConfigError, match=match) as caught:
        parse(text)
    assert str(caught.value).startswith("run.yaml")
    assert "cannot be read as YAML: " in str(caught.value)


# All but surrogates. To find what UTF-8 can encode, Hypothesis takes seconds.
texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.dictionaries(texts, values))
def test_what_is_written_is_read(value):
    assert parse(yaml.safe_dump(value, default_style='"')) == value


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab:-[]{}&*!|>'\"%@?,#<\n \t01.~"), max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        parse(text)
    except ConfigError as error:
        assert str(error).startswith("run.yaml")


def test_what_is_dumped_is_read_as_the_same():
    texts = [
        "on",
        "1e-4",
        "1.",
        "0x1f",
        "~",
        "",
        "null",
        "a: b",
        "two\nlines\n",
        "é",
        ".5",
    ]
    values = {"texts": texts, "numbers": [1e-5, 2e30, 3, -0.5, True, None], "empty": {}}
    assert parse_yaml(dump_yaml(values), "here") == values
    shared = {"a": 1}
    assert "&" not in dump_yaml([shared, shared])
