"""Curves are bounded, travel once, and the page allows its own script and no other."""

import itertools
import json
import math
import re

from jaxlora.serve.view import (
    Curves,
    Figures,
    Health,
    ModelRow,
    Page,
    Point,
    View,
)


def steps(points) -> list[int]:
    return [point.step for point in points]


def test_each_point_travels_once():
    curves = Curves()
    curves.add("a", Point(1, loss=3.0))
    curves.add("b", Point(1, loss=4.0))
    cursor, found = curves.after(0, {"a", "b"}, curves.epoch)
    assert steps(found["a"]) == steps(found["b"]) == [1]
    curves.add("a", Point(2, loss=2.0))
    curves.add("a", Point(2, held_out=2.5))
    assert curves.after(cursor, {"b"}, curves.epoch) == (4, {})
    cursor, found = curves.after(cursor, {"a", "b"}, curves.epoch)
    assert found == {"a": [Point(2, loss=2.0), Point(2, held_out=2.5)]}
    assert curves.after(cursor, {"a", "b"}, curves.epoch) == (cursor, {})
    _, every = curves.after(cursor, {"a", "b"}, "of another process")
    assert steps(every["a"]) == [1, 2, 2]
    assert curves.last("a") == Point(2, loss=2.0) and curves.last("c") is None


def test_long_curves_are_thinned_evenly():
    """So the first steps stay, and every new one is there at once."""
    curves = Curves()
    for step in range(1, 20_001):
        curves.add("a", Point(step, loss=1 / step))
        if step % 100 == 0:
            curves.add("a", Point(step, held_out=1.0))
    _, found = curves.after(0, {"a"}, "")
    trained = steps(p for p in found["a"] if p.loss is not None)
    held_out = steps(p for p in found["a"] if p.loss is None)
    assert len(found["a"]) <= 416 and trained == sorted(trained)
    assert trained[0] == 1 and trained[-50:] == [*range(19_951, 20_001)]
    assert held_out[0] == 100 and held_out[-1] == 20_000
    old = [step for step in trained if step < 19_900]
    gaps = [b - a for a, b in itertools.pairwise(old)]
    assert max(gaps) < 2 * 128


def test_a_step_that_is_done_again_replaces_those_after_it():
    curves = Curves()
    for step in (1, 2, 3, 2):
        curves.add("a", Point(step, loss=float(step)))
    assert steps(curves.after(0, {"a"}, "")[1]["a"]) == [1, 2]


def test_the_models_that_trained_last_have_curves():
    curves = Curves()
    for number in range(300):
        curves.add(f"{number}", Point(1, loss=1.0))
        curves.add("always", Point(number, loss=1.0))
    assert len(curves.models()) == 256 and "0" not in curves.models()
    assert {"299", "always"} <= set(curves.models())


def test_numbers_that_are_not_finite_are_null():
    curves = Curves()
    curves.add("a", Point(1, loss=math.nan, grad_norm=1 / 3))
    row = ModelRow(id="a", name="a", state="running", step=1, loss=math.nan)
    view = View(
        kind="run",
        title="",
        subtitle="",
        health=Health(level="good", text=""),
        epoch="",
        cursor=1,
        time=1796009054.25,
        figures=Figures(tokens_per_second=1 / 3, fill=math.inf),
        models=[row],
        points=curves.after(0, {"a"}, "")[1],
        rates=[],
    )
    found = json.loads(view.json())
    assert found["models"][0]["loss"] is None and found["figures"]["fill"] is None
    assert found["figures"]["tokens_per_second"] == 0.333333
    assert found["points"] == {"a": [[1, None, None, None, 0.333333]]}
    assert found["time"] == 1796009054.25


def test_the_page_allows_its_own_style_and_script():
    page = Page.of("server", state="/page/state", needs_key=True)
    text, policy = page.body.decode(), page.headers["Content-Security-Policy"]
    assert 'data-keys="true"' in text and "{{" not in text
    assert "unsafe" not in policy and "default-src 'none'" in policy
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "http:" not in (
        text.replace("http://www.w3.org/2000/svg", "")
    )
    assert " style=" not in text and "innerHTML" not in text
