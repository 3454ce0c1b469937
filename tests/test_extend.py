"""docs/extend.md states what changes take, by patches that are kept and applied."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
PATCHES = sorted((ROOT / "tests" / "extend").glob("*.patch"))
# A path in backticks, unless it is marked as a file to add.
PATH = re.compile(r"`([\w./-]+\.(?:py|md))`(?! \(new\))")
MOST = 6  # source files of a change
COPIED = ("jaxlora", "pallas_kernels", "sharding", "scheduler", "examples", "tests")
REFRESH = (
    "The tree has changed under {name}. Apply it by hand (patch -p1 --merge < "
    "tests/extend/{name}), mend what does not fit, and write it again: git diff > "
    "tests/extend/{name}. Then take the source back, and correct docs/extend.md."
)


def files_of(patch: pathlib.Path) -> list[str]:
    """The files that a patch changes or adds."""
    return re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), re.M)


def sources_of(patch: pathlib.Path) -> list[str]:
    """Those that are no tests."""
    return [name for name in files_of(patch) if not name.startswith("tests/")]


def copy_of_tree(folder: pathlib.Path) -> pathlib.Path:
    """Copies the sources, and what the check imports of the tests."""
    for name in COPIED:
        shutil.copytree(
            ROOT / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("golden", "*.jsonl", "*.safetensors"),
        )
    return folder


def apply(patch: pathlib.Path, folder: pathlib.Path, *options: str) -> None:
    run = subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not run.returncode, f"{REFRESH.format(name=patch.name)}\n{run.stderr}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> pathlib.Path:
    return copy_of_tree(tmp_path_factory.mktemp("tree"))


def test_every_file_exists():
    paths = PATH.findall(TEXT)
    assert len(paths) > 30
    missing = [path for path in paths if not (ROOT / path).is_file()]
    assert not missing, f"correct docs/extend.md: {missing}"


def test_the_table_has_the_numbers_of_the_patches():
    rows = re.findall(r"^\| .+ \| `tests/extend/(\w+\.patch)` \| (\d+) \|", TEXT, re.M)
    counts = {patch.name: len(sources_of(patch)) for patch in PATCHES}
    assert len(counts) == 6
    assert {name: int(number) for name, number in rows} == counts
    assert max(counts.values()) <= MOST


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_each_patch_changes_what_its_section_says(tree, patch):
    """And applies to the tree as it is."""
    apply(patch, tree, "--check")
    titles = {
        "family": "A model family",
        "format": "A quantized format",
        "objective": "An objective",
        "optimizer": "An optimizer",
        "setting": "A setting of the slots",
        "variant": "An adapter variant",
    }
    section = TEXT.split(f"\n## {titles[patch.stem]}\n")[1].split("\n## ")[0]
    missing = [name for name in sources_of(patch) if f"`{name}`" not in section]
    assert not missing, f"docs/extend.md: {titles[patch.stem]}: add {missing}"


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> pathlib.Path:
    """A copy of the tree that has every change."""
    folder = copy_of_tree(tmp_path_factory.mktemp("changed"))
    for patch in PATCHES:
        apply(patch, folder)
    return folder


def test_the_changes_apply_together(changed):
    """Python reads what they make of each file."""
    paths = {name for patch in PATCHES for name in files_of(patch)}
    for path in (changed / name for name in paths if name.endswith(".py")):
        compile(path.read_text(encoding="utf-8"), path, "exec")


def run_in(changed: pathlib.Path, tmp_path: pathlib.Path, *arguments: str) -> str:
    """Runs Python in the changed tree; returns what it prints."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=changed,
        env={
            "PYTHONPATH": str(changed),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": os.environ["XLA_FLAGS"],
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # see conftest.py
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert not run.returncode, run.stdout + run.stderr
    return run.stdout


@pytest.mark.grid  # above, they apply, and Python reads them
def test_the_changes_work_together(changed, tmp_path):
    """Each trains beside a job without it; they share one process."""
    assert "all changes work" in run_in(changed, tmp_path, "tests/extend/check.py")


@pytest.mark.grid
def test_the_tests_of_the_changes_pass(changed, tmp_path):
    tests = {name for p in PATCHES for name in files_of(p)} - {
        name for p in PATCHES for name in sources_of(p)
    }
    options = "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"
    assert " passed" in run_in(changed, tmp_path, *options, *tests)
