"""Pages in Debian's Chromium, which Playwright drives: on a desktop and on a phone."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or not HAS_PLAYWRIGHT,
    reason="needs Debian's chromium, and playwright of the extra dev",
)
DESKTOP, PHONE = (1280, 800), (390, 844)
_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A browser for the tests of a module.

    Its event loop is that of this thread until it ends, so it does not stay longer.
    """
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*_OPTIONS]
        ) as launched,
    ):
        yield launched


@contextlib.contextmanager
def opened(
    browser: "Browser",
    url: str,
    size: tuple[int, int] = DESKTOP,
    expected: Sequence[str] = (),
) -> "Iterator[Page]":
    """Opens a page, and checks how it behaved.

    It must log no errors, ask no other server, and be no wider than the screen, with
    text that can be read without zooming.

    Args:
        browser: The browser.
        url: Address of the page.
        size: Width and height; that of a phone makes the browser one.
        expected: Beginnings of the errors that it must log.
    """
    width, height = size
    is_phone = size == PHONE
    context = browser.new_context(
        viewport={"width": width, "height": height},
        is_mobile=is_phone,
        has_touch=is_phone,
    )
    errors: list[str] = []
    asked: list[str] = []
    with contextlib.closing(context):
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.clock.install()  # a test need not wait for timers
        page.goto(url)
        yield page
        assert page.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [
            width,
            width,
        ]
        font = page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)")
        assert font >= 14
    assert len(errors) == len(expected), errors
    assert all(map(str.startswith, errors, expected)), errors
    origin = url.split("?")[0].rpartition("/")[0]
    assert [one for one in asked if not one.startswith((origin, "data:"))] == []
