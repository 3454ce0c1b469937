"""Answers about the whole server, put together from those of its engines."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_LEVELS = ("good", "busy", "over", "bad")


class _Merged(Collector):
    def __init__(self, families: Sequence[Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merge_metrics(texts: Mapping[int, str], engines: Sequence[int]) -> bytes:
    """Returns metrics of engines as one text, with the engine as a label.

    Args:
        texts: The metrics of those that have answered, by number.
        engines: The numbers of all.
    """
    up = GaugeMetricFamily("jaxlora_engine_up", "1 if it answers.", labels=["engine"])
    families: dict[str, Metric] = {up.name: up}
    for number in engines:
        up.add_metric([str(number)], float(number in texts))
    for number, text in texts.items():
        label = {"engine": str(number)}
        for family in text_string_to_metric_families(text):
            new = Metric(family.name, family.documentation, family.type)
            own = families.setdefault(family.name, new)
            own.samples += [
                sample._replace(labels=label | sample.labels)
                for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Merged([*families.values()]))
    return prometheus_client.generate_latest(registry)


def merge_queues(queues: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the queues of jobs as one: lists are joined, and counts added."""
    return {
        key: sum((queue[key] for queue in queues[1:]), queues[0][key])
        for key in queues[0]
    }


def merge_views(views: Mapping[int, Mapping[str, Any]], away: Sequence[int]) -> Any:
    """Returns what the pages of engines show as one page.

    Args:
        views: What each shows, by number.
        away: Numbers of the engines that do not answer.
    """
    every = [*views.values()]
    rates: dict[float, list[Any]] = {}
    for time, tokens, fill in (rate for view in every for rate in view["rates"]):
        rates.setdefault(time, [time, 0.0, fill])[1] += tokens
    return dict(every[0]) | {
        "epoch": epoch_of(views),
        "cursor": ".".join(str(view["cursor"]) for view in every),
        "health": _health(views, away),
        "figures": _figures([view["figures"] for view in every]),
        "models": [row for view in every for row in view["models"]],
        "points": {k: x for view in every for k, x in view["points"].items()},
        "rates": [rates[time] for time in sorted(rates)],
        "tenants": _tenants([view["tenants"] for view in every]),
        "samples": [row for view in every for row in view["samples"]],
    }


def epoch_of(views: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns a word for the epochs of engines."""
    return ".".join(f"{number}-{view['epoch']}" for number, view in views.items())


def _health(
    views: Mapping[int, Mapping[str, Any]], away: Sequence[int]
) -> dict[str, str]:
    found = [(number, view["health"]) for number, view in views.items()]
    found += [(number, {"level": "bad", "text": "away"}) for number in away]
    worst = max(found, key=lambda one: _LEVELS.index(one[1]["level"]))[1]
    rest = [f"engine {n}: {h['text']}" for n, h in found if h["level"] != "good"]
    return dict(worst) | ({"text": ", ".join(rest)} if rest else {})


def _figures(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds numbers; a share is the mean, and a duration the longest."""
    found: dict[str, Any] = {}
    for key in every[0]:
        known = [one[key] for one in every if one[key] is not None]
        found[key] = sum(known) if known else None
        if known and key == "fill":
            found[key] /= len(known)
        elif known and key == "commit_seconds":
            found[key] = max(known)
    return found


def _tenants(every: Sequence[Sequence[Mapping[str, Any]] | None]) -> Any:
    if every[0] is None:
        return None
    found: dict[str, dict[str, Any]] = {}
    for row in (row for rows in every for row in rows or ()):
        if (old := found.get(row["name"])) is None:
            found[row["name"]] = dict(row)
        else:
            old |= {key: old[key] + row[key] for key in row if key != "name"}
    return [found[name] for name in sorted(found)]
