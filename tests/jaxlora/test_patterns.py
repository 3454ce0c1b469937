"""Regular expressions of strangers: what they match, and for how long they may try."""

import random
import re
import time
import warnings

import pytest

from jaxlora.common.patterns import Patterns
from jaxlora.errors import ConfigError

NAMES = [f"model.layers.{i}.self_attn.q_proj" for i in range(100)]
# Each takes time exponential in the length of a name, also from `regex`.
SLOW = [r"(.|[a-z]|[^!])*[!?]", r"(.|.)*!?\d"]
# These only from `re`.
NESTED = ["(([a-z_.0-9])+)+!", "((.)+)+[^a-z_.0-9]", r"(\w+\.?)+(?<=z)"]


@pytest.mark.parametrize("expression", SLOW)
def test_all_names_share_one_budget(expression):
    patterns = Patterns("job 'a'", seconds=0.2)
    patterns.check("target_modules", expression)
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"job 'a': .* takes longer than 0\.2 s to"):
        for name in NAMES:
            patterns.fullmatch(expression, name)
    assert time.process_time() - start < 2
    with pytest.raises(ConfigError, match="takes longer"):
        patterns.match_suffix("q_proj", NAMES[0])


@pytest.mark.parametrize("expression", NESTED)
def test_repetitions_inside_repetitions(expression):
    patterns = Patterns("job 'a'", seconds=10)
    assert not any(patterns.fullmatch(expression, name) for name in NAMES)
    assert not any(patterns.match_suffix(expression, name) for name in NAMES)


PIECES = [
    ".", "*", "+", "?", "|", "(", ")", "(?:", "[a-z]", "[^.]", "[[a]", "[a&&b]", "$",
    "^", "_proj", "layers", r"\.", r"\d", r"\w", r"\b", r"\Z", r"\1", "{2}", "{,3}",
    "*?", "++", "(?i)", "(?=", "(?!", "(?<=", "(?>", "(?P<n>", "(?P=n)", r"\p{L}",
    r"\K", r"\R", "(?i:", "(?x)", "#", "1", "{", "}",
]  # fmt: skip


def test_matches_are_those_of_re():
    rng = random.Random(0)
    names = ["model.layers.11.mlp.up_proj", "up_proj", "1", "layers\n", "lm_head"]
    patterns = Patterns("here", seconds=60)
    num_compared = 0
    for _ in range(4000):
        expression = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                whole = re.compile(expression)
                end = re.compile(rf"(.*\.)?({expression})$")
            except (re.error, ValueError):
                continue
        try:
            patterns.check("key", expression)
            patterns.check("key", expression, is_end=True)
        except ConfigError as error:
            assert "cannot match the name of a module" in str(error)
            continue
        for name in names:
            expected = (bool(whole.fullmatch(name)), bool(end.match(name)))
            found = (
                patterns.fullmatch(expression, name),
                patterns.match_suffix(expression, name),
            )
            assert found == expected, (expression, name)
        num_compared += 1
    assert num_compared > 500


@pytest.mark.parametrize(
    "expression",
    [
        "(",
        "a{99999999999}",
        "(" * 5000 + ")" * 5000,
        "(?a)(?u)a",
        "(((a{1000}){1000}){1000}){1000}",
        "[a-z]{4000000}",
        "[[:alpha:]]+",
        "(?:q_proj){e<=1}",
        r"\p{L}",
        "a|" * 200_000,
    ],
)
def test_what_is_no_expression(expression):
    with pytest.raises(
        ConfigError, match=r"job 'a': key .* is not a valid regular expression"
    ):
        Patterns("job 'a'").check("key", expression)
    with pytest.raises(
        ConfigError, match=r"job 'a': key .* is not a valid regular expression"
    ):
        Patterns("job 'a'").check("key", expression, is_end=True)


def test_many_repetitions_beside_each_other_are_short():
    expression = "|".join(rf"layers\.\d{{2}}\.part{i}" for i in range(40))
    Patterns("job 'a'").check("key", expression)


def test_escaped_names_match_themselves():
    patterns = Patterns("here")
    for name in NAMES:
        patterns.check("key", re.escape(name), is_end=True)
        assert [n for n in NAMES if patterns.match_suffix(re.escape(name), n)] == [name]
