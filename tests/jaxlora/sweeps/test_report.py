"""The report of a sweep: ranking, importance, table and page."""

import csv
import dataclasses
import html.parser
import io
import math
import pathlib
import re

import numpy as np
import pytest
from rich.console import Console

from jaxlora import LoraJob, Sweep
from jaxlora.errors import StorageError
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps import files
from jaxlora.sweeps.engine.result import work_of
from jaxlora.sweeps.files import merge_best, print_sweep, remove_others, write_sweep
from jaxlora.sweeps.page import importance, parallel_axes
from jaxlora.sweeps.ranking import SweepReport, Trial
from tests.jaxlora.train.made_run import write_export

NUM_STEPS = 8


def trial(name: str, loss: float | None, folder=None, **settings) -> Trial:
    job = LoraJob(name=name, data={"path": "a.jsonl"}, eval_fraction=0.2, **settings)
    progress = JobProgress(
        status="stopped early" if name.endswith("x") else "finished",
        reason="halving: place 3 of 4 <b>",
        stopped_by="halving" if name.endswith("x") else None,
        step=4,
        num_tokens=12345,
        best_eval=loss,
        best_step=4 if loss else None,
    )
    return Trial(
        name=name,
        settings=job,
        rank=job.rank,
        num_modules=1,
        num_steps=NUM_STEPS,
        batch_tokens=1.0,
        progress=progress,
        folder=folder,
    )


def events(*names: str) -> list[dict]:
    found = []
    for step in range(3):
        for i, name in enumerate(names):
            found.append(
                {"event": "eval", "job": name, "step": 4 * step, "eval_loss": 3 - i}
            )
            tokens = {"event": "step", "job": name, "step": step, "num_tokens": 100 + i}
            found.append(tokens)
        found.append({"event": "window", "seconds": 6.0})
    return found


@pytest.fixture
def report() -> SweepReport:
    trials = [
        trial("a", 2.0, learning_rate=1e-3, rank=4),
        trial("bx", 1.0, learning_rate=1e-4, rank=8, optimizer="lion"),
        trial("c", None, learning_rate=1e-2, rank=4),
        trial("d", 1.0, learning_rate=1e-1, rank=8, target_modules=["q_proj"]),
    ]
    return SweepReport.of(Sweep(keep=2), trials, events("a", "bx"))


def test_seconds_are_those_of_all_devices_of_a_group():
    logs = {pathlib.Path("groups/0-1"): events("a"), pathlib.Path("1-1"): events("b")}
    trials = [trial("a", 1.0), trial("b", 2.0)]
    report = SweepReport.of(Sweep(), trials, work_of(logs, num_devices=[1, 4]))
    assert report.seconds == {"a": 18.0, "b": 72.0}


def test_ranking(report):
    assert [t.settings.name for t in report.trials] == ["bx", "d", "a", "c"]
    assert report.kept == ("bx", "d") and report.best.loss == 1.0
    assert list(report.varied) == [
        "rank",
        "target_modules",
        "learning_rate",
        "optimizer",
    ]
    assert report.curves["a"] == ((0, 3), (4, 3), (8, 3))
    assert sum(report.seconds.values()) == pytest.approx(18)
    ratio = report.seconds["bx"] / report.seconds["a"]
    assert ratio == pytest.approx(101 / 100)
    place, name, *rest = report.row(0)
    assert (place, name, rest[-4:]) == (1, "bx", [8, "all-linear", 1e-4, "lion"])
    assert report.row(0)[7] == "halving at 4" and report.row(2)[7] == "finished"


def test_one_that_was_never_evaluated_is_not_kept():
    found = SweepReport.of(Sweep(keep=3), [trial("a", None), trial("b", 1.0)], [])
    assert found.kept == ("b",)


def by_answers(name: str, value: float, loss: float, step: int, **settings) -> Trial:
    """A configuration of a sweep with a metric of answers."""
    found = trial(name, loss, **settings)
    best = {"best_metric": value, "best_step": step}
    progress = dataclasses.replace(found.progress, **best)
    return dataclasses.replace(found, progress=progress)


def test_equal_metrics_are_ranked_by_the_loss_and_then_the_later_step():
    trials = [
        by_answers("start", 0.0, 2.0, 0),
        by_answers("later", 0.0, 2.0, 4),
        by_answers("lower", 0.0, 1.5, 2),
        by_answers("higher", 0.1, 3.0, 2),
        by_answers("none", 0.0, 2.0, 4),
    ]
    found = SweepReport.of(Sweep(metric="exact_match", keep=2), trials, [])
    names = [one.settings.name for one in found.trials]
    assert names == ["higher", "lower", "later", "none", "start"]
    assert found.kept == ("higher", "lower")


def test_an_adapter_of_step_0_is_named(tmp_path, caplog, monkeypatch):
    """In the tables of the terminal, of the page and of the csv, and in a merge."""
    folder = write_export(tmp_path / "a", "a", 0)
    trials = [
        by_answers("a", 0.6, 1.0, 0, keep_best=True, folder=folder),
        by_answers("b", 0.6, 2.0, 0),
        by_answers("c", 0.6, 2.5, 4, keep_best=True),
    ]
    found = SweepReport.of(Sweep(metric="exact_match"), trials, [])
    of_a, of_b = (
        "its adapter is that of step 0",
        "its best evaluation is that of step 0",
    )
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [row["warning"] for row in rows] == [of_a, of_b, ""]
    text = io.StringIO()
    print_sweep(found, tmp_path, Console(file=text, width=60))
    assert f"warning: a: {of_a}\nwarning: b: {of_b}\n" in text.getvalue()
    write_sweep(found, tmp_path)
    assert of_a in Page((tmp_path / "sweep.html").read_text()).texts
    monkeypatch.setattr(files, "merge_adapter", lambda *args, **kwargs: None)
    merge_best(found, tmp_path, "base", None)
    assert f"a is merged into its base: {of_a}" in caplog.text
    fine = SweepReport.of(Sweep(), [trial("d", 1.0)], [])
    assert "warning" not in fine.header()


def test_what_was_never_evaluated_is_not_merged(tmp_path):
    folder = write_export(tmp_path / "a", "a", 3)
    merge_best(
        SweepReport.of(Sweep(), [trial("a", None, folder)], []), tmp_path, "", None
    )
    assert not (tmp_path / "merged").exists()


def test_a_file_in_the_place_of_the_merged_folder_is_reported(tmp_path):
    folder = write_export(tmp_path / "a", "a", 3)
    (tmp_path / "merged").touch()
    found = SweepReport.of(Sweep(), [trial("a", 1.0, folder)], [])
    with pytest.raises(StorageError, match="merged"):
        merge_best(found, tmp_path, "base", None)


def test_the_table_is_csv(report):
    rows = list(csv.DictReader(io.StringIO(report.csv())))
    assert [row["configuration"] for row in rows] == ["bx", "d", "a", "c"]
    assert [row["kept"] for row in rows] == ["True", "True", "False", "False"]
    assert float(rows[0]["learning_rate"]) == 1e-4 and rows[3]["held-out loss"] == ""
    formula = [trial("a", 1.0, target_modules="=1+2"), trial("b", 1.0)]
    text = SweepReport.of(Sweep(), formula, []).csv()
    assert "'=1+2" in text


def test_importance_finds_the_setting_that_decides():
    rng = np.random.default_rng(0)
    names = [f"c{i}" for i in range(120)]
    varied = {
        "rank": {n: int(rng.choice([4, 8, 16])) for n in names},
        "learning_rate": {n: float(10 ** rng.uniform(-5, -2)) for n in names},
        "schedule": {n: str(rng.choice(["linear", "cosine"])) for n in names},
        "keep_best": {n: bool(rng.random() < 0.5) for n in names},
    }
    losses = {
        n: (math.log10(varied["learning_rate"][n]) + 3.5) ** 2
        + 0.3 * (varied["schedule"][n] == "linear")
        for n in names
    }
    found = importance(varied, losses)
    assert next(iter(found)) == "learning_rate" and found["learning_rate"] > 0.6
    assert max(found["rank"], found["keep_best"]) < 0.1
    by_schedule = {n: float(varied["schedule"][n] == "linear") for n in names}
    assert importance(varied, by_schedule)["schedule"] == pytest.approx(1)
    # A loss that outweighs all others changes only one place.
    wild = losses | {"c0": 1e9}
    assert importance(varied, wild)["learning_rate"] == pytest.approx(
        found["learning_rate"], abs=0.1
    )
    assert importance(varied, {}) == dict.fromkeys(varied, 0.0)
    assert importance(varied, dict.fromkeys(names, 1.0)) == dict.fromkeys(varied, 0.0)
    no_loss = losses | {"c0": math.inf}
    assert importance(varied, no_loss)["learning_rate"] > 0.6


def test_axes_place_every_configuration(report):
    axes = {axis.name: axis for axis in parallel_axes(report)}
    assert [*axes] == [*report.varied, "held-out loss"]
    assert axes["rank"].places == (1, 1, 0, 0)
    assert axes["rank"].ticks == ((0, "4"), (1, "8"))
    assert axes["held-out loss"].places == (0, 0, 1, 1)  # the worst, without a loss
    many = [trial(f"a{i}", 1.0 + i, learning_rate=10.0**-i) for i in range(1, 11)]
    axis, _ = parallel_axes(SweepReport.of(Sweep(), many, []))
    assert axis.places == pytest.approx([1 - i / 9 for i in range(10)])  # logarithmic
    assert axis.ticks[0] == (0, "1e-10")


class Page(html.parser.HTMLParser):
    """Collects the tags and texts of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_the_page_needs_nothing_else(report, tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    trials = [*report.trials, trial("e", 3.0, target_modules=evil)]
    write_sweep(SweepReport.of(Sweep(), trials, events("a", "e")), tmp_path)
    text = (tmp_path / "sweep.html").read_text()
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert not {"img", "link", "iframe"} & set(tags) and tags.count("script") == 1
    assert not any(k in a for _, a in page.tags for k in ("src", "href", "onerror"))
    assert not re.search(r"https?://", text)
    assert evil in page.texts and "{{" not in text
    lines = [a for tag, a in page.tags if tag == "polyline"]
    assert len(lines) == 2 * len(trials)
    rows = [a for tag, a in page.tags if tag == "tr" and "data-row" in a]
    assert len(rows) == len(trials) and [a.get("class") for a in rows[:2]] == [
        "best",
        None,
    ]
    assert (tmp_path / "sweep.csv").read_text().count("\n") == len(trials) + 1


def test_the_table_on_the_terminal(report, tmp_path):
    text = io.StringIO()
    print_sweep(report, tmp_path, Console(file=text, width=140))
    shown = text.getvalue()
    assert re.search(r"1 +bx +1\.000 +4 +4 +12,345 .*halving at 4 +8", shown)
    assert "sweep.html" in shown and "optimizer" in shown
    narrow = io.StringIO()
    print_sweep(report, tmp_path, Console(file=narrow, width=80))
    assert "optimizer" not in narrow.getvalue()
    assert "tokens" not in narrow.getvalue()
    assert "halving at 4" in narrow.getvalue()
    many = [trial(f"a{i}", 1.0 + i, seed=i) for i in range(30)]
    print_sweep(SweepReport.of(Sweep(), many, []), tmp_path, Console(file=text))
    assert "and 10 more in" in text.getvalue()


def test_only_folders_of_others_are_removed(tmp_path):
    run, other = tmp_path / "run" / "adapters", tmp_path / "other"
    folders = {n: write_export(run / n, n, 3) for n in ("a", "b", "c")}
    (folders["c"] / "notes.txt").write_text("mine")
    folders["d"] = write_export(other / "d", "d", 3)  # of another run
    folders["e"] = run / "e"
    folders["e"].symlink_to(write_export(other / "e", "e", 3))
    trials = [trial(n, 1.0 + i, folders[n]) for i, n in enumerate(folders)]
    report = SweepReport.of(Sweep(), trials, [])
    remove_others(report, run.parent)
    there = [True, False, True, True, True]
    assert [folder.is_dir() for folder in folders.values()] == there
    run.rename(other / "adapters")
    run.symlink_to(other / "adapters")  # all of them are reached through a link now
    write_export(run / "b", "b", 3)
    remove_others(report, run.parent)
    assert folders["b"].is_dir()


def test_one_configuration_has_a_report_too(tmp_path):
    write_sweep(SweepReport.of(Sweep(), [trial("a", 1.0)], events("a")), tmp_path)
    assert (tmp_path / "sweep.html").is_file()
