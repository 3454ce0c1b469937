"""The examples of the pages on fuse run, and the reference names files that exist."""

import pathlib
import re

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[3]
PAGES = [ROOT / "docs" / "fuse.md", ROOT / "docs" / "reference" / "fuse.md"]


def run_example(word):
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    examples = re.findall(r"<!-- example -->\n```python\n(.*?)```", text, re.S)
    (code,) = (example for example in examples if word in example)
    names = {}
    exec(code, names)
    return names


def test_the_example_gives_the_same_numbers(capsys):
    names = run_example("explain")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        names["after"],
        names["before"],
    )
    assert capsys.readouterr().out


def test_the_example_with_a_module_gives_the_same_numbers():
    names = run_example("nnx")
    arguments = (names[name] for name in ("lora", "frozen", "x", "key"))
    value, gradients = jax.value_and_grad(names["loss"])(*arguments)
    np.testing.assert_allclose(names["value"], value, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        names["gradients"],
        gradients,
    )


def test_the_table_of_forms_names_files():
    folder = ROOT / "tests" / "jaxlora" / "fuse" / "forms"
    files = re.findall(r"`(\w+\.py)`", PAGES[1].read_text(encoding="utf-8"))
    assert files and all((folder / name).is_file() for name in files)
