"""The commands of the pages run, on the tiny model."""

import shutil

from tests.docs import pages
from tests.examples.commands import run_page

GUIDES = (pages.DOCS / "tutorial.md", *sorted((pages.DOCS / "howto").glob("*.md")))
RUN = {
    page.relative_to(pages.DOCS).as_posix(): page
    for page in GUIDES
    if pages.code_blocks(page, "bash")
}


def test_the_commands_of_all_pages_in_one_clone(clone):
    """A reader goes from one page to the next, and no page needs what another wrote.

    They run on the first records of each file, which saves time.
    """
    for path in (clone / "examples" / "data").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:20]))
    for name, page in RUN.items():
        shutil.rmtree(clone / "models" / "tiny", ignore_errors=True)
        try:
            assert run_page(page) > 0
        except BaseException as error:
            error.add_note(f"while it ran the commands of docs/{name}")
            raise


def test_pages_with_commands():
    assert {name for name in RUN if name.startswith("howto/from_")} == {
        "howto/from_axolotl.md",
        "howto/from_peft.md",
        "howto/from_unsloth.md",
    }
    assert "tutorial.md" in RUN
