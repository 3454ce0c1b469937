"""Tests notice small mistakes in the code that they test."""

import collections
import pathlib

import pytest

from tests.mutants.copies import ROOT, make_copy, run_with, sources
from tests.mutants.table import MUTANTS, Mutant


def test_each_mistake_can_be_made():
    """A mutant whose text has changed would say nothing, so it is aimed again."""
    texts = [path.read_text() for path in sources(ROOT)]
    wrong = []
    for mutant in MUTANTS:
        count = sum(text.count(mutant.old) for text in texts)
        if count != 1:
            wrong.append(f"{mutant.wrong!r}: {mutant.old!r} occurs {count} times")
        wrong += (
            f"{mutant.wrong!r}: there is no {test}"
            for test in mutant.tests
            if not is_test(test)
        )
    assert not wrong, "\n".join(
        (
            "The code has changed, so that these mutants cannot be made. Give each of "
            "them in tests/mutants/table.py the text that now does what `wrong` says, "
            "or the tests that notice it, and run",
            "  pytest -m grid tests/mutants -k '...'",
            *wrong,
        )
    )


def is_test(test: str) -> bool:
    """Whether there is a file of tests, and the function in it, if one is named."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.exists() and (not name or f"def {name}(" in path.read_text())


def test_mistakes_differ():
    counts = collections.Counter(mutant.wrong for mutant in MUTANTS)
    assert counts.most_common(1)[0][1] == 1
    assert all(mutant.old != mutant.new for mutant in MUTANTS)


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_copy(tmp_path_factory.mktemp("mutants") / "copy")


# Each takes 5 to 20 s, most of it the start of a process of its own.
@pytest.mark.grid
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.wrong)
def test_a_mistake_is_noticed(mutant: Mutant, copy: pathlib.Path):
    done = run_with(mutant, copy)
    assert done.returncode == 1, done.stdout[-3000:]
