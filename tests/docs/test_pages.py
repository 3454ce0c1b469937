"""The pages lead somewhere, and the reference pages leave nothing out."""

import csv
import pathlib
import pkgutil
import re
import types

import pytest

import jaxlora
from jaxlora import pallas_kernels, scheduler
from tests.docs import pages

REFERENCE = pages.DOCS / "reference"


def test_the_home_page_lists_every_page():
    """As `test_site` holds for the built site, without building it."""
    home = pages.DOCS / "index.md"
    linked = {
        (home.parent / link.partition("#")[0]).resolve() for link in pages.links(home)
    }
    assert set(pages.DOCS.rglob("*.md")) - {home} <= linked


def test_files_that_pages_name_exist():
    """The log keeps old names, and the page on extending names files to be added."""
    folders = "jaxlora|scheduler|sharding|pallas_kernels|scripts|tests|docs|examples"
    name = re.compile(rf"`((?:{folders})/[\w/.-]*\w)/?`")
    missing = [
        f"{page.relative_to(pages.ROOT)}: {path}"
        for page in pages.pages()
        if page.parent.name != "log" and page.name != "extend.md"
        for path in name.findall(page.read_text(encoding="utf-8"))
        if not (pages.ROOT / path).exists()
    ]
    assert not missing


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


def test_lines_fit_a_screen():
    """Prose is wrapped; tables, code and links cannot be."""
    long = []
    for page in pages.pages():
        if page.parent.name == "log" or page.name == "CHANGELOG.md":
            continue
        is_code, lines = False, page.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            is_code ^= line.lstrip().startswith(("```", "~~~"))
            is_prose = not is_code and not line.startswith(("    ", "|"))
            if is_prose and len(line) > 120 and " " in line.strip():
                long.append(f"{page.relative_to(pages.ROOT)}:{number}")
    assert not long


TABLES = sorted(pages.DOCS.rglob("*.csv"))


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.name)
def test_measurements_say_where_and_when(path: pathlib.Path):
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row[key] for row in rows for key in ("device", "versions", "date"))


@pytest.mark.parametrize(
    ("package", "page"),
    [
        (jaxlora, "python.md"),
        (pallas_kernels, "kernels.md"),
        (scheduler, "scheduler.md"),
    ],
)
def test_every_public_name_is_in_the_reference(package: types.ModuleType, page: str):
    """By its docstring, in a table of constants, or as a module of listed functions."""
    text = (REFERENCE / page).read_text()
    listed = re.findall(r"^::: ([\w.]+)$", text, re.M)
    rows = re.findall(r"^\| `(\w+)` \|", text, re.M)
    found = {*rows, *(name.rpartition(".")[2] for name in listed)}
    found |= {name.split(".")[-2] for name in listed}
    assert set(package.__all__) - {"__version__"} - found == set()


def test_the_reference_shows_functions_and_classes():
    """A package named as its function (`jaxlora.fuse`) has another docstring."""
    for page in REFERENCE.glob("*.md"):
        listed = re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
        assert len(set(listed)) == len(listed), f"{page.name} has a name twice"
        shown = {name: pkgutil.resolve_name(name) for name in listed}
        modules = {n for n, v in shown.items() if isinstance(v, types.ModuleType)}
        assert modules <= {"jaxlora.run.events"}


def test_the_run_file_of_the_readme(tmp_path: pathlib.Path):
    """It is valid, and a clone has its data."""
    (text,) = pages.code_blocks(pages.ROOT / "README.md", "yaml")
    (tmp_path / "run.yaml").write_text(text)
    for job in jaxlora.load_run(tmp_path / "run.yaml").jobs:
        assert (pages.ROOT / job.data.path).is_file()


def test_the_readme_is_short():
    """It fits one screen: at most one picture, one table and three code blocks."""
    text = (pages.ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 60
    assert len(re.findall(r"^\|---", text, re.M)) == 1
    assert text.count("![") <= 1
    assert text.count("```") <= 6


def test_the_tutorial_shows_its_run_files(tmp_path: pathlib.Path):
    shown, swept = pages.code_blocks(pages.DOCS / "tutorial.md", "yaml")
    written = (pages.ROOT / "examples" / "tutorial.yaml").read_text()
    assert written.endswith(shown)
    (tmp_path / "run.yaml").write_text(swept)
    jobs = jaxlora.load_run(tmp_path / "run.yaml").jobs
    assert len(jobs) == 12 and (pages.ROOT / jobs[0].data.path).is_file()


def test_anchors_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b.c` & [D](e.md)\n\n```text\n# not one\n```\n\n## E, f\n")
    assert pages.anchors(page) == {"a-bc--d", "e-f"}
    assert pages.links(page) == ["e.md"]


def test_code_blocks_of_a_page(tmp_path: pathlib.Path):
    page = tmp_path / "page.md"
    page.write_text("```bash\na\nb\n```\n\n```yaml\nc: 1\n```\n\n```bash\nd\n```\n")
    assert pages.code_blocks(page, "bash") == ["a\nb\n", "d\n"]
