"""`scripts/test.sh`, with stand-ins for the tools that it runs."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = ("uv", "ruff", "pyrefly", "python")


def run_tests(folder: pathlib.Path, failing: str = "") -> tuple[int, str]:
    """Runs the script where each tool prints its name; returns status and output."""
    (folder / "scripts").mkdir()
    for name in ("test.sh", "python.sh"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    (folder / ".venv/bin").mkdir(parents=True)
    for tool in TOOLS:
        stand_in = folder / ".venv/bin" / tool
        stand_in.write_text(f"#!/bin/sh\necho {tool} $1\nexit {int(tool == failing)}\n")
        stand_in.chmod(0o755)
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


def test_nothing_runs_without_an_environment(tmp_path):
    status, output = run_tests(tmp_path, "uv")
    assert (status, output) == (1, "uv pip\n")
