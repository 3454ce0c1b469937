"""Answers of engines, put together."""

from jaxlora.serve.fleet import merge

TEXT = """# HELP jaxlora_steps_total Steps.
# TYPE jaxlora_steps_total counter
jaxlora_steps_total{{tenant="a"}} {}
"""


def test_metrics_get_the_engine_as_a_label():
    texts = {0: TEXT.format(3.0), 2: TEXT.format(5.0)}
    found = merge.merge_metrics(texts, [0, 1, 2]).decode()
    assert found.count("# TYPE jaxlora_steps_total counter") == 1
    assert 'jaxlora_steps_total{engine="0",tenant="a"} 3.0' in found
    assert 'jaxlora_steps_total{engine="2",tenant="a"} 5.0' in found
    assert 'jaxlora_engine_up{engine="1"} 0.0' in found


def test_queues_are_joined():
    one, other = (
        {"running": [name], "waiting": [], "all_running": 1, "places": 4}
        for name in "ab"
    )
    found = {"running": ["a", "b"], "waiting": [], "all_running": 2, "places": 8}
    assert merge.merge_queues([one, other]) == found


def view(tenant: str, **changes):
    row = {"name": tenant, "models": 1, "waiting_tokens": 2, "waiting_datums": 1}
    return {
        "title": "m",
        "epoch": "a",
        "cursor": 3,
        "health": {"level": "good", "text": "serving"},
        "figures": {"steps": 2, "fill": 0.5, "commit_seconds": 0.1, "slots": None},
        "models": [{"id": tenant}],
        "points": {tenant: [[1]]},
        "rates": [[5.0, 10.0, None], [10.0, 20.0, None]],
        "tenants": [row | {"tokens_per_second": 1.0}],
        "samples": [],
    } | changes


def test_views_are_one_page():
    other = view("b", rates=[[10.0, 1.0, None]], health={"level": "bad", "text": "no"})
    other["figures"] |= {"fill": 1.0, "commit_seconds": 0.3}
    found = merge.merge_views({0: view("a"), 1: other, 2: view("a")}, [3])
    assert found["cursor"] == "3.3.3" and found["epoch"] == "0-a.1-a.2-a"
    assert found["health"] == {"level": "bad", "text": "engine 1: no, engine 3: away"}
    figures = {"steps": 6, "fill": 2 / 3, "commit_seconds": 0.3, "slots": None}
    assert found["figures"] == figures
    assert [row["id"] for row in found["models"]] == ["a", "b", "a"]
    assert found["rates"] == [[5.0, 20.0, None], [10.0, 41.0, None]]
    assert [(row["name"], row["models"]) for row in found["tenants"]] == [
        ("a", 2),
        ("b", 1),
    ]
    alone = {0: view("a", tenants=None), 1: view("b", tenants=None)}
    assert merge.merge_views(alone, [])["tenants"] is None
    assert merge.merge_views(alone, [])["health"]["text"] == "serving"
