"""Each package imports only the packages below it."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# jaxlora holds a link to each of these folders.
LINKED = {
    "bench": "scripts/bench",
    "pallas_kernels": "pallas_kernels",
    "profile": "scripts/profile",
    "scheduler": "scheduler",
    "sharding": "sharding",
}
LEAVES = {"pallas_kernels", "sharding", "scheduler"}
MAY_IMPORT = {
    "pallas_kernels": set(),
    "sharding": set(),
    "scheduler": set(),
    "jaxlora": LEAVES,
    "profile": LEAVES | {"jaxlora"},
    "bench": LEAVES | {"jaxlora", "profile"},
    "scripts": LEAVES | {"jaxlora", "profile", "bench"},
}
ALSO = {"jaxlora/cli.py": {"bench"}}  # the command line starts benchmarks
LIBRARIES_NEVER_IN = {"scheduler": {"jax", "jaxlib", "flax"}}


def files_of(package: str) -> list[pathlib.Path]:
    folder = ROOT / LINKED.get(package, package)
    if package == "scripts":
        return sorted(folder.glob("*.py"))
    return sorted(folder.rglob("*.py"))  # does not follow links


def imported(path: pathlib.Path) -> set[str]:
    """Returns dotted names of imports, with each `from` import's names appended."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def package_of(name: str) -> str:
    """Returns `scheduler` for `jaxlora.scheduler.plan`, or else the first part."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return second if first == "jaxlora" and second in LINKED else first


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_import_direction(package):
    files = files_of(package)
    assert files
    for path in files:
        names = imported(path)
        here = str(path.relative_to(ROOT))
        outside = {
            n for n in names if n.startswith(("scripts.bench", "scripts.profile"))
        }
        outside |= {n for n in names if n.partition(".")[0] in LINKED}
        assert not outside, f"{here}: import {outside} by its name in jaxlora"
        packages = {package_of(name) for name in names}
        allowed = MAY_IMPORT[package] | {package} | ALSO.get(here, set())
        bad = packages & {*MAY_IMPORT, "tests"} - allowed
        bad |= packages & LIBRARIES_NEVER_IN.get(package, set())
        assert not bad, f"{here} must not import {sorted(bad)}"
