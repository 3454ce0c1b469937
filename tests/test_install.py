"""The installed package owns one import name, `jaxlora`."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LINKED = ("pallas_kernels", "scheduler", "sharding")
# Beside this script lies a scheduler.py, and other people's packages are installed.
SCRIPT = """
import importlib, pkgutil, sys

import scheduler, sharding
assert scheduler.OWNER == "the script" and sharding.OWNER == "another package"

import jaxlora.config, jaxlora.scheduler, jaxlora.sharding.stages
assert not any(name.split(".")[0] == "jax" for name in sys.modules)
every = pkgutil.walk_packages(jaxlora.__path__, "jaxlora.")
for name in sys.argv[1:] or [module.name for module in every]:
    if not name.endswith("__main__"):
        importlib.import_module(name)
names = {name.split(".")[0] for name in sys.modules}
assert "pallas_kernels" not in names
print(jaxlora.__file__)
"""


def run(*command: str | pathlib.Path, **options) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def build(source: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Builds a wheel with the setuptools of this environment."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", *options, out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    """Copies what a build reads, so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("jaxlora", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> pathlib.Path:
    return build(source, tmp_path_factory.mktemp("wheel"))


def modules(wheel: pathlib.Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_every_part(wheel):
    found = modules(wheel)
    assert {name.split("/")[0] for name in found} == {"jaxlora"}
    assert "jaxlora/py.typed" in found
    for part in (*LINKED, "jaxlora/profile"):
        files = [p for p in (ROOT / part).rglob("*") if p.suffix in (".py", ".json")]
        assert files
        paths = (p.relative_to(ROOT).as_posix() for p in files)
        assert {f"jaxlora/{path.removeprefix('jaxlora/')}" for path in paths} <= found


def test_the_wheel_holds_no_benchmark(wheel):
    assert not [name for name in modules(wheel) if "bench" in name]


@pytest.mark.grid  # the wheel that is built from the tree is read above
def test_a_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    hook = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", hook, tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert modules(build(archive, tmp_path)) == modules(wheel)


@pytest.mark.parametrize(
    "how",
    [
        "wheel",
        # `test_dependencies.py` reads what all modules import.
        pytest.param("as in this environment", marks=pytest.mark.grid),
    ],
)
def test_other_packages_keep_their_names(how, wheel, tmp_path):
    site, script = tmp_path / "site", tmp_path / "script" / "train.py"
    for name in ("scheduler", "sharding"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("OWNER = 'another package'")
    if how == "wheel":
        zipfile.ZipFile(wheel).extractall(site)
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "scheduler.py").write_text("OWNER = 'the script'")
    inherited = os.environ.get("PYTHONPATH", "")
    path = str(site) if how == "wheel" else f"{site}:{ROOT}"
    environment = {"PYTHONPATH": f"{path}:{inherited}", "JAX_PLATFORMS": "cpu"}
    # All modules are imported once; another test says that the wheel has them.
    some = ["jaxlora.cli.main", "jaxlora.train.trainer"] if how == "wheel" else []
    environment = os.environ | environment
    loaded = run(sys.executable, script, *some, env=environment, cwd=tmp_path)
    expected = site if how == "wheel" else ROOT
    assert pathlib.Path(loaded.strip()) == expected / "jaxlora" / "__init__.py"
