"""The commands of the pages run, on the tiny model."""

import pytest

from tests.docs import pages
from tests.examples.commands import run_page

GUIDES = (pages.DOCS / "tutorial.md", *(pages.DOCS / "howto").glob("*.md"))
RUN = {
    page.relative_to(pages.DOCS).as_posix(): page
    for page in sorted(GUIDES)
    if pages.code_blocks(page, "bash")
}


@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page(clone, name):
    """They run on the first records of each file, which saves time."""
    for path in (clone / "examples" / "data").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:20]))
    assert run_page(RUN[name]) > 0


def test_pages_with_commands():
    assert {name for name in RUN if name.startswith("howto/from_")} == {
        "howto/from_axolotl.md",
        "howto/from_peft.md",
        "howto/from_unsloth.md",
    }
    assert "tutorial.md" in RUN
