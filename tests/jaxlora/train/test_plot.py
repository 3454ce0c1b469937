"""The picture of a run with many jobs names the best ones, and is drawn as it goes."""

import json
import pathlib

import pytest

from jaxlora.run.log import RunLog
from jaxlora.train.report import plot
from jaxlora.train.report.plot import LossPlot, plot_losses, rank_jobs
from tests.jaxlora.run import made_events


@pytest.fixture
def metrics(tmp_path) -> pathlib.Path:
    log = RunLog(tmp_path, keep_rounds=None)
    for i in range(40):
        for number in range(1, 4):
            log.on_event(made_events.step(f"job{i}", number, loss=3 + i / 10))
        if i % 2:
            log.on_event(made_events.evaluation(f"job{i}", 3, loss=4 - i / 10))
    log.close()
    return tmp_path / "metrics.jsonl"


def test_the_best_jobs_are_named(metrics, monkeypatch):
    drawn = []
    draw = plot._draw
    monkeypatch.setattr(plot, "_draw", lambda *args: drawn.append(args) or draw(*args))
    plot_losses(metrics, metrics.parent / "losses.png")
    assert (metrics.parent / "losses.png").read_bytes()[:4] == b"\x89PNG"
    assert len(drawn) == 2
    for axes, curves, names in drawn:
        assert names[:3] == ["job39", "job37", "job35"] and len(names) == 40
        assert len(axes.lines) == len(curves)
        colors = [line.get_color() for line in axes.lines]
        assert colors.count("0.8") == len(curves) - 8
        assert colors[-1] == "C0" and axes.lines[-1].get_label() == "job39"
    labels = drawn[0][0].get_legend_handles_labels()[1]
    assert len(labels) == 9 and "32 more" in labels


def test_jobs_without_evaluations_are_ranked_by_their_training_loss():
    curves = {"step": {"a": [(1, 2.0)], "b": [(1, 1.0)], "c": [(1, 9.0)]}, "eval": {}}
    assert rank_jobs(curves) == ["b", "a", "c"]
    assert rank_jobs(curves | {"eval": {"c": [(0, 8.0)]}}) == ["c", "b", "a"]


def test_the_picture_is_refreshed(metrics, monkeypatch):
    now, drawn = [0.0], []
    monkeypatch.setattr(plot.time, "monotonic", lambda: now[0])

    def draw(*_):
        drawn.append(now[0])
        now[0] += 1  # a slow picture

    monkeypatch.setattr(plot, "plot_losses", draw)
    follows = LossPlot(metrics.parent)
    for second in range(0, 400, 10):
        now[0] = max(now[0], float(second))
        follows.on_event(made_events.window(1))
    assert drawn == [60.0, 260.0]  # then 200 s later, so that it takes half a percent
    assert json.loads(metrics.read_text().splitlines()[0])["event"] == "step"
