"""The commands of the pages run, on the tiny model."""

import contextlib
import json
import shutil

import pytest

from tests.docs import pages
from tests.examples.commands import read_command, run_command, run_page

GUIDES = (pages.DOCS / "tutorial.md", *sorted((pages.DOCS / "howto").glob("*.md")))
RUN = {
    page.relative_to(pages.DOCS).as_posix(): page
    for page in GUIDES
    if pages.code_blocks(page, "bash")
}


@pytest.fixture
def few(clone):
    """The first records of each file, which saves time."""
    for path in (clone / "examples" / "data").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:20]))
    return clone


@pytest.mark.grid
def test_the_commands_of_all_pages_in_one_clone(few):
    """A reader goes from one page to the next, and no page needs what another wrote."""
    for name, page in RUN.items():
        shutil.rmtree(few / "models" / "tiny", ignore_errors=True)
        with _noting(name):
            assert run_page(page) > 0


@pytest.mark.grid  # below, its commands are read; test_examples.py plans its run
def test_the_commands_of_the_tutorial(few):
    assert run_page(RUN["tutorial.md"]) == 4
    summary = json.loads((few / "runs/tutorial/summary.json").read_text())
    assert len(summary["jobs"]) == 2
    for job in summary["jobs"].values():
        assert job["status"] == "finished"
        assert job["last_eval"] < job["first_eval"] - 0.2
        assert (few / job["folder"] / "adapter_config.json").is_file()


def test_commands_and_run_files_of_all_pages_are_read(few):
    for name, page in RUN.items():
        with _noting(name):
            assert run_page(page, read_command) > 0


@contextlib.contextmanager
def _noting(name: str):
    """Adds the name of a page to an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the commands of docs/{name}")
        raise


def test_pages_with_commands():
    assert {name for name in RUN if name.startswith("howto/from_")} == {
        "howto/from_axolotl.md",
        "howto/from_peft.md",
        "howto/from_unsloth.md",
    }
    assert "tutorial.md" in RUN


def test_the_commands_of_the_readme_fit_their_files(few):
    """Its run and its sweep are planned with the tiny model; nothing is trained."""
    readme, hub_id = pages.ROOT / "README.md", "HuggingFaceTB/SmolLM2-135M-Instruct"
    (run_file,) = pages.code_blocks(readme, "yaml")
    (few / "run.yaml").write_text(run_file.replace(hub_id, "models/tiny"))
    lines = pages.code_blocks(readme, "bash")[0].splitlines()
    commands = [line.partition("#")[0].strip() for line in lines if line[0] != "#"]
    assert commands[0] == "bash scripts/demo.sh"
    train, sweep = (line.removeprefix(".venv/bin/") for line in commands[1:])
    assert train == "jaxlora train run.yaml"
    run_command("jaxlora plan run.yaml")
    assert sweep.startswith("jaxlora sweep ")
    run_command(f"{sweep.replace(hub_id, 'models/tiny')} --dry-run")
