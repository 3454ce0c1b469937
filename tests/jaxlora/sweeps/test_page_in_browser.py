"""The page of a sweep in a browser, from the disk: on a desktop and on a phone."""

import numpy as np
import pytest

from jaxlora import Sweep
from jaxlora.sweeps.page import write_page
from jaxlora.sweeps.ranking import SweepReport
from tests.browser import DESKTOP, PHONE, browser, needs_browser, opened
from tests.jaxlora.sweeps.test_report import events, trial

__all__ = ["browser"]
pytestmark = needs_browser

COLUMN = """[...document.querySelectorAll('#table tbody tr')].map(
    row => row.cells[%d].dataset.value ?? row.cells[%d].textContent)"""
SHOWN = """[...document.querySelectorAll('#table tbody tr:not(.off)')].map(
    row => row.dataset.row)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    rng = np.random.default_rng(0)
    trials = [
        trial(
            f"lr{rate:.3g}-r{rank}-a-long-name-of-a-configuration-{i}",
            None if i == 7 else float(loss),
            learning_rate=float(rate),
            rank=int(rank),
            lr_schedule=str(rng.choice(["cosine", "constant"])),
        )
        for i, (rate, rank, loss) in enumerate(
            zip(
                10 ** rng.uniform(-4, -2, 64),
                rng.choice([8, 16, 32], 64),
                rng.uniform(4, 6, 64),
                strict=True,
            )
        )
    ]
    path = tmp_path_factory.mktemp("page") / "sweep.html"
    names = [one.settings.name for one in trials]
    report = SweepReport.of(Sweep(), trials, events(*names))
    write_page(report, "runs/a <sweep> & more", path)
    return path


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_page(page, browser, size):
    with opened(browser, page.as_uri(), size) as tab:
        assert tab.title() == "runs/a <sweep> & more"
        assert tab.locator("polyline").count() >= 63


def test_sorting(page, browser):
    with opened(browser, page.as_uri()) as tab:
        heads = tab.locator("#table th button")
        column = heads.all_text_contents().index("learning_rate")
        for sign in (1, -1):
            heads.nth(column).click()
            values = [float(v) for v in tab.evaluate(COLUMN % (column, column))]
            assert len(values) == 64 and values == sorted(values, reverse=sign < 0)


def test_a_range_on_an_axis_filters(page, browser):
    with opened(browser, page.as_uri()) as tab:
        area = tab.locator("rect.drag").first
        box = area.bounding_box()
        x, top, size = box["x"] + box["width"] / 2, box["y"], box["height"]
        tab.mouse.move(x, top + 0.3 * size)
        tab.mouse.down()
        tab.mouse.move(x, top + 0.5 * size)
        tab.mouse.move(x, top + 0.7 * size)
        tab.mouse.up()
        places = area.get_attribute("data-places")
        shown = set(map(int, tab.evaluate(SHOWN)))
        for number, place in enumerate(map(float, places.split())):
            if abs(place - 0.5) < 0.15:
                assert number in shown
            elif not abs(place - 0.5) < 0.25:
                assert number not in shown
        assert 0 < len(shown) < 64
        tab.mouse.click(x, top + 0.5 * size)
        assert len(tab.evaluate(SHOWN)) == 64
