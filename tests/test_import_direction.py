"""Each package imports only what stands below it."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PARTS = {"pallas_kernels", "sharding", "scheduler"}  # of jaxlora, and its leaves
MAY_IMPORT = {
    "pallas_kernels": set(),
    "sharding": set(),
    "scheduler": set(),
    "jaxlora": PARTS,
    "scripts": PARTS | {"jaxlora"},
}
LIBRARIES_NEVER_IN = {"scheduler": {"jax", "jaxlib", "flax"}}


def imported(path: pathlib.Path) -> set[str]:
    """Dotted names of what a file imports, with each `from` import's names added."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def package_of(name: str) -> str:
    """`scheduler` of `jaxlora.scheduler.plan`; otherwise the first part of a name."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return second if first == "jaxlora" and second in PARTS else first


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_import_direction(package):
    files = sorted((ROOT / package).rglob("*.py"))  # does not follow links
    assert files
    for path in files:
        names = imported(path)
        outside = {name for name in names if name.partition(".")[0] in PARTS}
        assert not outside, f"{path}: import {outside} by its name in jaxlora"
        packages = {package_of(name) for name in names}
        bad = packages & set(MAY_IMPORT) - MAY_IMPORT[package] - {package}
        bad |= packages & LIBRARIES_NEVER_IN.get(package, set())
        assert not bad, f"{path.relative_to(ROOT)} must not import {sorted(bad)}"
