"""Each package imports only what stands below it."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAY_IMPORT = {
    "pallas_kernels": set(),
    "sharding": set(),
    "scheduler": set(),
    "jaxlora": {"pallas_kernels", "sharding", "scheduler"},
    "scripts": {"pallas_kernels", "sharding", "scheduler", "jaxlora"},
}
LIBRARIES_NEVER_IN = {"scheduler": {"jax", "jaxlib", "flax"}}


def imported(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_import_direction(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        names = imported(path)
        bad = names & set(MAY_IMPORT) - MAY_IMPORT[package] - {package}
        bad |= names & LIBRARIES_NEVER_IN.get(package, set())
        assert not bad, f"{path.relative_to(ROOT)} must not import {sorted(bad)}"
