"""Imports are declared, and a command imports no more than it needs."""

import functools
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from scripts import arrows

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Benchmarks compare with other libraries where these are installed, and the fuser knows
# the forms of others; jaxlora needs none of them.
OTHERS = {"torch", "transformers", "peft", "tokamax", "IPython"}
NEVER_FOR_HELP = {"jax", "numpy", "pydantic", "matplotlib", "pyarrow", "scipy"}
NEVER_BEFORE_A_MODEL = {
    *("matplotlib", "scipy", "pulp", "networkx", "orbax", "pandas", "torch", "triton"),
    *("datasets", "gguf", "wandb", "trackio", "IPython", "transformers"),
}


def names(requirements: list[str]) -> set[str]:
    """Returns the normalized names of distributions."""
    return {
        re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", r, maxsplit=1)[0]).lower()
        for r in requirements
    }


NEEDED = names(PROJECT["dependencies"])
EXTRAS = {e: names(r) for e, r in PROJECT["optional-dependencies"].items()}


@functools.cache  # not when tests are collected, as it reads thousands of names
def installed() -> dict[str, list[str]]:
    """Returns the distributions of each package that is installed."""
    return dict(importlib.metadata.packages_distributions())


def distributions(module: str) -> set[str]:
    """Returns the distributions that an import may come from."""
    return names(installed().get(module, [module]))


def test_imports_are_declared():
    """Also those that another dependency happens to bring along."""
    declared = NEEDED.union(*EXTRAS.values())
    missing = {}
    for module, path in arrows.find_modules().items():
        if not module.startswith("jaxlora"):
            continue
        for name in arrows.imported_names(path):
            first = name.partition(".")[0]
            if first in sys.stdlib_module_names | OTHERS | {"jaxlora"}:
                continue
            if not distributions(first) & declared:
                missing.setdefault(first, []).append(module)
    assert not missing


def imported_by(code: str) -> set[str]:
    """Returns the first parts of the names of modules after some code has run."""
    script = f"import sys\n{code}\nprint('modules', *sys.modules)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()[1:]}


@pytest.mark.parametrize(
    ("code", "never"),
    [
        (
            "from jaxlora.cli.main import main\ntry: main(['--help'])\n"
            "except SystemExit: pass",
            NEVER_FOR_HELP,
        ),
        (
            "import jaxlora.config, jaxlora.config.run_file",
            {"jax", "matplotlib", "pyarrow"},
        ),
        (
            "import jaxlora.config.run_file, jaxlora.sweeps.trainer",
            NEVER_BEFORE_A_MODEL,
        ),
    ],
    ids=["help", "settings", "train"],
)
def test_what_is_not_imported(code, never):
    """`jaxlora --help` must be there at once, and a faulty run refused soon."""
    assert not imported_by(code) & never


def test_every_command_is_listed_without_jax():
    """A command's module is imported for its help; what it needs, when it runs."""
    assert not imported_by("import jaxlora.cli.commands") & NEVER_FOR_HELP


def test_windows_is_refused_in_plain_words():
    code = "import importlib.metadata, sys; sys.platform = 'win32'; import jaxlora"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "WSL 2" in done.stderr
