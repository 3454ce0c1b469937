"""The page in a browser: of a run that trains, and of a server with two tenants."""

from jaxlora import Callback, LoraJob, RunConfig, Trainer
from jaxlora.serve.run_page import serve_run
from tests import tiny
from tests.browser import PHONE, browser, needs_browser, opened
from tests.jaxlora.train.runs import LINEARS, TWO_SLOTS

__all__ = ["browser"]
pytestmark = needs_browser

CURVE = "document.querySelector('path[data-model=\"%s\"]')?.getAttribute('d')"
SHIFTS = """new PerformanceObserver(list => list.getEntries().forEach(
    one => { window.shifted = (window.shifted || 0) + one.value; })
).observe({type: 'layout-shift', buffered: true})"""


def look(tab) -> None:
    """Lets the page ask again, at once."""
    tab.clock.fast_forward(2000)


class Watch(Callback):
    """Looks at the page at each step of a job."""

    def __init__(self, tab):
        self.tab, self.curves = tab, []

    def on_step(self, event) -> None:
        if event.job != "first":
            return
        look(self.tab)
        self.tab.get_by_text(f"{event.step} / {event.num_steps}").wait_for()
        self.curves.append(self.tab.evaluate(CURVE % "first"))


def test_the_page_of_a_run_moves_while_it_trains(browser, tmp_path):
    model = tiny.write_model(tmp_path / "base")
    jobs = [
        LoraJob(
            name=name,
            data={"path": tiny.write_records(tmp_path / f"{name}.jsonl", 12, i)},
            rank=4,
            target_modules=LINEARS,
            steps=3,
            max_length=96,
            eval_fraction=0.2,
        )
        for i, name in enumerate(("first", "second"))
    ]
    folder = tmp_path / "run"
    config = RunConfig(
        model=str(model), output_dir=str(folder), jobs=tuple(jobs), **TWO_SLOTS
    )
    address = serve_run(folder, str(model), 0)
    with opened(browser, address) as tab:
        tab.get_by_text("The run prepares").wait_for()
        watch = Watch(tab)
        Trainer(config).train(callbacks=[watch])
        look(tab)
        tab.get_by_text("ended", exact=True).wait_for()
        assert len(set(watch.curves)) == 3
        # The keyboard opens a row, whose curve then stands out.
        row = tab.get_by_role("button", name="second")
        row.focus()
        tab.keyboard.press("Enter")
        assert row.get_attribute("aria-expanded") == "true"
        assert tab.locator("path.curve.chosen").first.is_visible()
        assert tab.get_by_text("Rank").is_visible()
    with opened(browser, address, PHONE) as tab:
        tab.evaluate(SHIFTS)
        tab.get_by_role("button", name="first").wait_for()
        assert tab.evaluate("window.shifted || 0") < 0.1
