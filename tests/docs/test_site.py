"""The documentation site builds without a warning."""

import re
import warnings

import pytest
from material.plugins.search.plugin import SearchPlugin
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.docs import pages


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site; a warning, such as a broken link, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("NO_MKDOCS_2_WARNING", "1")  # advertisement of a theme
        # The index of the search takes a fifth of the time.
        patch.setattr(SearchPlugin, "on_page_context", lambda *_, **__: None)
        config = load_config(
            str(pages.ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True
        )
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return folder


def test_the_help_of_every_command_is_on_the_site(site):
    text = (site / "reference" / "command_line.html").read_text()
    for option in ("--resume", "--picture", "--overwrite", "--device"):
        assert option in text


def test_docstrings_are_on_the_site(site):
    text = (site / "reference" / "python.html").read_text()
    assert "Optimizer steps between evaluations" in text  # of LoraJob
    assert "Trains until every job has ended" in text  # of Trainer.train


def test_examples_are_on_the_site(site):
    assert {path.name for path in (site / "examples").glob("*.yaml")} == {
        path.name for path in (pages.ROOT / "examples").glob("*.yaml")
    }


def test_the_home_page_lists_every_page(site):
    linked = set(re.findall(r'href="([^"#]+\.html)', _main(site / "index.html")))
    found = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert found - {"404.html", "index.html"} == linked


def _main(page):
    """The text of a page, without the navigation."""
    text = page.read_text()
    return text[text.index("<article") : text.index("</article>")]
