"""Each package imports only the packages below it, and no imports form a cycle."""

import pytest

from scripts import arrows

MODULES = arrows.find_modules()
LEAVES = {"pallas_kernels", "sharding", "scheduler"}
MAY_IMPORT = {
    "pallas_kernels": set(),
    "sharding": set(),
    "scheduler": set(),
    "jaxlora": LEAVES,
    "scripts": LEAVES | {"jaxlora"},
}
LIBRARIES_NEVER_IN = {"scheduler": {"jax", "jaxlib", "flax"}}
# jaxlora holds a link to each of these folders, by the name in front.
LINKED = {path.name: path.resolve() for path in arrows.links()}
OUTSIDE = tuple(
    ".".join(path.relative_to(arrows.ROOT).parts) for path in LINKED.values()
)


def package_of(name: str) -> str:
    """Returns `scheduler` for `jaxlora.scheduler.packers`, or else the first part."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return second if first == "jaxlora" and second in LINKED else first


def test_every_link_has_a_rule():
    assert LINKED.keys() <= MAY_IMPORT.keys()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_import_direction(package):
    modules = [module for module in MODULES if package_of(module) == package]
    assert modules
    for module in modules:
        packages = {package_of(n) for n in arrows.imported_names(MODULES[module])}
        allowed = MAY_IMPORT[package] | {package}
        bad = packages & {*MAY_IMPORT, "tests"} - allowed
        bad |= packages & LIBRARIES_NEVER_IN.get(package, set())
        assert not bad, f"{module} must not import {sorted(bad)}"


def test_linked_folders_are_imported_as_parts_of_jaxlora():
    """A module that is imported by two names exists twice."""
    for module, path in MODULES.items():
        for name in arrows.imported_names(path):
            is_outside = any(f"{name}.".startswith(f"{o}.") for o in OUTSIDE)
            assert not is_outside, f"{module}: import {name} by its name in jaxlora"


def test_no_modules_import_each_other_in_a_cycle():
    """Imports inside functions count: they would only hide a cycle."""
    cycle = arrows.find_cycle(arrows.module_graph(MODULES))
    assert not cycle, " imports ".join(reversed(cycle))
