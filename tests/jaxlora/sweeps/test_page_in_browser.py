"""The page of a sweep in a browser, from the disk: on a desktop and on a phone."""

import numpy as np
import pytest

from jaxlora import Sweep
from jaxlora.sweeps.page import write_page
from jaxlora.sweeps.ranking import SweepReport
from tests.jaxlora.sweeps.browser import FOUND, opened
from tests.jaxlora.sweeps.test_report import events, trial

pytestmark = pytest.mark.skipif(FOUND is None, reason="needs Chromium")

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("phone", [False, True])
def test_page(page, browser, phone):
    width, height = (390, 844) if phone else (1280, 800)
    browser.open(page, width, height, phone=phone)
    assert browser.run("document.title") == "runs/a <sweep> & more"
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('polyline').length") >= 63
    # Text is large enough to be read without zooming.
    assert browser.run("parseFloat(getComputedStyle(document.body).fontSize)") >= 14
    assert browser.errors == []


def test_sorting(page, browser):
    browser.open(page, 1280, 800, phone=False)
    heads = browser.run(
        "[...document.querySelectorAll('#table th button')].map(b => b.textContent)"
    )
    column = heads.index("learning_rate")
    for sign in (1, -1):
        click = f"document.querySelectorAll('#table th button')[{column}].click()"
        browser.run(click)
        values = [float(v) for v in browser.run(COLUMN % (column, column))]
        assert len(values) == 64 and values == sorted(values, reverse=sign < 0)
    assert browser.errors == []


def test_a_range_on_an_axis_filters(page, browser):
    browser.open(page, 1280, 800, phone=False)
    box = """(() => {const r = document.querySelector('rect.drag')
        .getBoundingClientRect(); return [r.x + r.width / 2, r.y, r.height]})()"""
    x, top, size = browser.run(box)
    for kind, share in (("Moved", 0.3), ("Pressed", 0.3), ("Moved", 0.5)):
        browser.mouse(f"mouse{kind}", x, top + share * size)
    browser.mouse("mouseReleased", x, top + 0.7 * size)
    places = browser.run("document.querySelector('rect.drag').dataset.places")
    shown = set(map(int, browser.run(SHOWN)))
    for number, place in enumerate(map(float, places.split())):
        if abs(place - 0.5) < 0.15:
            assert number in shown
        elif not abs(place - 0.5) < 0.25:
            assert number not in shown
    assert 0 < len(shown) < 64
    browser.mouse("mousePressed", x, top + 0.5 * size)
    browser.mouse("mouseReleased", x, top + 0.5 * size)
    assert len(browser.run(SHOWN)) == 64
    assert browser.errors == []
