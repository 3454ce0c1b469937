"""The pages lead somewhere, and the reference pages leave nothing out."""

import pathlib
import re

import jaxlora
from tests.docs import pages


def test_links_lead_to_files_and_headings():
    """Links that work in a clone and on a Git host; the site's build checks its own."""
    broken = []
    for page in pages.pages():
        for link in pages.links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or not target.is_relative_to(pages.ROOT):
                broken.append(f"{page.relative_to(pages.ROOT)}: {link}")
            elif anchor and anchor not in pages.anchors(target):
                broken.append(f"{page.relative_to(pages.ROOT)}: {link} (no heading)")
    assert not broken


def test_every_public_name_is_in_the_reference():
    text = (pages.DOCS / "reference" / "python.md").read_text()
    listed = set(re.findall(r"^::: jaxlora\.(\w+)$", text, re.M))
    assert listed == set(jaxlora.__all__) - {"__version__"}


def test_the_tutorial_shows_its_run_file():
    (shown,) = pages.code_blocks(pages.DOCS / "tutorial.md", "yaml")
    written = (pages.ROOT / "examples" / "tutorial.yaml").read_text()
    assert written.endswith(shown)


def test_anchors_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b.c` & [D](e.md)\n\n```text\n# not one\n```\n\n## E, f\n")
    assert pages.anchors(page) == {"a-bc--d", "e-f"}
    assert pages.links(page) == ["e.md"]


def test_code_blocks_of_a_page(tmp_path: pathlib.Path):
    page = tmp_path / "page.md"
    page.write_text("```bash\na\nb\n```\n\n```yaml\nc: 1\n```\n\n```bash\nd\n```\n")
    assert pages.code_blocks(page, "bash") == ["a\nb\n", "d\n"]
