"""`scripts/test.sh`, with stand-ins for the tools that it runs."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = ("pip", "uv", "ruff", "pyrefly", "python")


def run_tests(
    folder: pathlib.Path, failing: str = "", missing: str = "", pip_settings: str = ""
) -> tuple[int, str]:
    """Runs the script where each tool prints its name; returns status and output."""
    (folder / "scripts").mkdir()
    for name in ("test.sh", "python.sh"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    (folder / ".venv/bin").mkdir(parents=True)
    for tool in set(TOOLS) - {missing}:
        stand_in = folder / ".venv/bin" / tool
        does = f"echo {tool} $1; exit {int(tool == failing)}"
        stand_in.write_text(
            f"#!/bin/sh\n[ $1 = config ] && exec cat settings\n{does}\n"
        )
        stand_in.chmod(0o755)
    (folder / "settings").write_text(pip_settings)
    run = subprocess.run(
        ["bash", "scripts/test.sh"], cwd=folder, capture_output=True, text=True
    )
    return run.returncode, run.stdout


def test_all_pass(tmp_path):
    assert run_tests(tmp_path) == (
        0,
        "uv pip\nruff check\nruff format\npyrefly check\npython -m\n",
    )


@pytest.mark.parametrize("failing", ["ruff", "pyrefly", "python"])
def test_each_decides_the_status_and_the_tests_run(failing, tmp_path):
    status, output = run_tests(tmp_path, failing)
    assert status == 1
    assert output.endswith("python -m\n")
    assert ("The tests run all the same" in output) == (failing != "python")


@pytest.mark.parametrize(
    ("settings", "installer"),
    [
        ("global.index-url='https://mirror.example/simple'\n", "pip install"),
        (":env:.no-index='1'\n:env:.find-links='wheels'\n", "pip install"),
        ("global.proxy='proxy.example:3128'\n", "pip install"),
        ("global.extra-index-url='https://more.example'\n", "uv pip"),
    ],
)
def test_an_index_of_pip_is_that_of_the_installation(settings, installer, tmp_path):
    output = run_tests(tmp_path, pip_settings=settings)[1].splitlines()
    assert output[-5] == installer
    assert (len(output) == 6) == (installer == "pip install")  # it says why


def test_an_environment_of_an_earlier_version_gets_uv(tmp_path):
    """It is not made again, for which there may be no other Python."""
    assert run_tests(tmp_path, missing="uv")[1].startswith("pip install\n")


def test_nothing_runs_without_an_environment(tmp_path):
    status, output = run_tests(tmp_path, "uv")
    assert (status, output) == (1, "uv pip\n")
