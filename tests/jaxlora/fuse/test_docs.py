"""The example of docs/fuse.md runs, and its pages name files that exist."""

import pathlib
import re

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "fuse.md").read_text(encoding="utf-8")


def test_the_example_gives_the_same_numbers(capsys):
    code = re.search(r"<!-- example -->\n```python\n(.*?)```", TEXT, re.S)
    assert code is not None
    names = {}
    exec(code[1], names)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        names["after"],
        names["before"],
    )
    assert capsys.readouterr().out


def test_the_table_of_forms_names_files():
    folder = ROOT / "tests" / "jaxlora" / "fuse" / "forms"
    files = re.findall(r"`(\w+\.py)`", TEXT)
    assert files and all((folder / name).is_file() for name in files)
