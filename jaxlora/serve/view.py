"""What the page shows of a server or of a run, and the page itself.

The page is one file without data. It asks a route for a `View` every second, and sends
the cursor of the last one, so that each point of a curve travels once.
"""

import base64
import collections
import dataclasses
import hashlib
import html
import json
import math
import re
import secrets
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NamedTuple

_MOST_MODELS = 256
# Points of a curve: the newest are never thinned, and before them there is at most one
# of each kind in a stretch.
_MOST_POINTS, _NEWEST, _STRETCHES = 416, 64, 160
_MARKS = re.compile(r"\{\{(\w+)\}\}")

Kind = Literal["server", "run"]
Level = Literal["good", "busy", "over", "bad"]


class Point(NamedTuple):
    """A point of a model's curves; None: it has no such value.

    Attributes:
        step: Optimizer steps done.
        loss: Training loss, in nats per target token.
        held_out: Loss on held-out samples, in nats per target token.
        learning_rate: Learning rate of the step.
        grad_norm: Norm of the gradient, before clipping.
    """

    step: int
    loss: float | None = None
    held_out: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None

    @staticmethod
    def of(event: Mapping[str, Any]) -> "Point | None":
        """Returns the point of an event, as metrics.jsonl has it; None: it has none."""
        match event["event"]:
            case "step":
                return Point(
                    event["step"],
                    loss=event["loss"],
                    learning_rate=event["learning_rate"],
                    grad_norm=event["grad_norm"],
                )
            case "eval":
                return Point(event["step"], held_out=event["eval_loss"])
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Whether all is well.

    Attributes:
        level: `busy`: it prepares; `over`: it has ended.
        text: A few words.
    """

    level: Level
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Numbers of the whole; None: not known, or not for this reader.

    Attributes:
        tokens_per_second: Tokens trained on.
        fill: Share of the positions of microbatches that hold tokens.
        steps: Optimizer steps done.
        done: Share of a run that is done.
        seconds_left: Estimated time until a run has ended.
        waiting_tokens: Tokens that wait for a microbatch.
        waiting_datums: Datums that wait for a microbatch.
        slots: Slots on the device.
        resident: Models that have one.
        parked: Models whose state is in the host's memory.
        cold: Models whose state is in a file.
        sampled_per_second: Tokens sampled.
        commit_seconds: Duration of the last commit of the log.
    """

    tokens_per_second: float | None = None
    fill: float | None = None
    steps: int | None = None
    done: float | None = None
    seconds_left: float | None = None
    waiting_tokens: int | None = None
    waiting_datums: int | None = None
    slots: int | None = None
    resident: int | None = None
    parked: int | None = None
    cold: int | None = None
    sampled_per_second: float | None = None
    commit_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """A model of a server, or a job.

    Attributes:
        id: Its id.
        name: What it is called.
        tenant: Whose it is; empty in a run.
        state: Where it is, or its status.
        step: Optimizer steps done.
        num_steps: Optimizer steps in all; None: its client decides.
        rank: Its rank.
        loss: Latest training loss.
        held_out: Lowest loss on held-out samples.
        waiting_tokens: Tokens that wait for a microbatch.
        waiting_datums: Datums that wait for a microbatch.
        note: More about its state, such as why it has ended.
    """

    id: str
    name: str
    state: str
    step: int
    tenant: str = ""
    num_steps: int | None = None
    rank: int | None = None
    loss: float | None = None
    held_out: float | None = None
    waiting_tokens: int = 0
    waiting_datums: int = 0
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TenantRow:
    """A tenant of a server.

    Attributes:
        name: Its name.
        models: Number of its models.
        waiting_tokens: Tokens that wait for a microbatch.
        waiting_datums: Datums that wait for a microbatch.
        tokens_per_second: Tokens trained on.
    """

    name: str
    models: int
    waiting_tokens: int
    waiting_datums: int
    tokens_per_second: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A text that was generated.

    Attributes:
        model: Which model or job has generated it.
        prompt: The prompt.
        text: The text.
        note: When, or why it ends.
    """

    model: str
    prompt: str
    text: str
    note: str


class Rate(NamedTuple):
    """Work of some seconds.

    Attributes:
        time: Their end, in seconds since 1970.
        tokens_per_second: Tokens trained on.
        fill: Share of the positions of microbatches that hold tokens; None: not known.
    """

    time: float
    tokens_per_second: float
    fill: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the page shows.

    Attributes:
        kind: What is shown.
        title: The base model.
        subtitle: The folder of a run, or whose view it is.
        health: Whether all is well.
        epoch: Another one says that all points come anew.
        cursor: Number of the newest point.
        time: When, in seconds since 1970.
        figures: Numbers of the whole.
        models: The models, in the order in which they are shown.
        points: New points by model.
        rates: The work of the last minutes.
        tenants: The tenants; None: not for this reader.
        samples: The latest texts, the newest first.
    """

    kind: Kind
    title: str
    subtitle: str
    health: Health
    epoch: str
    cursor: int
    time: float
    figures: Figures
    models: Sequence[ModelRow]
    points: Mapping[str, Sequence[Point]]
    rates: Sequence[Rate]
    tenants: Sequence[TenantRow] | None = None
    samples: Sequence[Sample] = ()

    def json(self) -> bytes:
        """Returns the view as JSON; numbers that are not finite are null."""
        found = _plain(dataclasses.replace(self, points={}))
        found["points"] = self.points  # which `Curves` has made plain
        return json.dumps(found, allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """Makes JSON values; rounds numbers, and replaces those that are not finite."""
    if isinstance(value, float):
        return _rounded(value)
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return round(value, 2) if abs(value) >= 1e5 else float(f"{value:.6g}")


class Curves:
    """The curves of the models that had points last, thinned to a bounded number.

    Any thread may use it.

    Attributes:
        epoch: A random word, by which the page notices that it is another object.
    """

    def __init__(self):
        self.epoch = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._cursor = 0
        # Each point with its number.
        self._points: collections.OrderedDict[str, list[tuple[int, Point]]]
        self._points = collections.OrderedDict()

    def add(self, model: str, point: Point) -> None:
        """Adds a point. A step that is done again replaces those from it on.

        Numbers are rounded to six digits; those that are not finite become None.
        """
        point = Point(point.step, *map(_rounded, point[1:]))
        with self._lock:
            self._cursor += 1
            points = self._points.setdefault(model, [])
            self._points.move_to_end(model)
            if point.loss is not None:
                while points and _is_after(points[-1][1], point):
                    points.pop()
            points.append((self._cursor, point))
            if len(points) > _MOST_POINTS:
                self._points[model] = _thinned(points)
            if len(self._points) > _MOST_MODELS:
                self._points.popitem(last=False)

    def models(self) -> list[str]:
        """Returns the models that have points; those that had one last are last."""
        with self._lock:
            return [*self._points]

    def last(self, model: str) -> Point | None:
        """Returns the newest training point of a model."""
        with self._lock:
            points = reversed(self._points.get(model, ()))
            return next((one for _, one in points if one.loss is not None), None)

    def after(
        self, cursor: int, models: Container[str], epoch: str
    ) -> tuple[int, dict[str, list[Point]]]:
        """Returns the cursor now, and the points of some models after another one.

        Args:
            cursor: The other one.
            models: The models.
            epoch: That of the curves that the other one is of.
        """
        with self._lock:
            if epoch != self.epoch:
                cursor = 0
            found = {
                model: new
                for model, points in self._points.items()
                if model in models and (new := [*_newer(points, cursor)])
            }
            return self._cursor, found


def _is_after(one: Point, other: Point) -> bool:
    is_same = one.step == other.step and one.held_out is None
    return one.step > other.step or is_same


def _newer(points: list[tuple[int, Point]], cursor: int) -> Iterator[Point]:
    start = next((i for i, (n, _) in enumerate(points) if n > cursor), len(points))
    yield from (point for _, point in points[start:])


def _thinned(points: list[tuple[int, Point]]) -> list[tuple[int, Point]]:
    """Keeps the newest points, and of those before them the first in each stretch.

    The lengths of stretches are powers of two, so that a longer one begins where a
    shorter one does, and its first point is still there.
    """
    old, new = points[:-_NEWEST], points[-_NEWEST:]
    steps = points[-1][1].step - points[0][1].step
    length = 2 ** math.ceil(math.log2(max(1.0, steps / _STRETCHES)))
    first: dict[tuple[bool, int], tuple[int, Point]] = {}
    for number, point in old:
        stretch = point.held_out is not None, point.step // length
        first.setdefault(stretch, (number, point))
    return [*first.values(), *new]


# ---- the page ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The page, as it is sent.

    Attributes:
        body: The file.
        headers: Its headers. They allow its own style and script, and no other.
    """

    body: bytes
    headers: Mapping[str, str]

    @staticmethod
    def of(kind: Kind, *, state: str, needs_key: bool) -> "Page":
        """Returns the page.

        Args:
            kind: What it shows.
            state: Path of the route that answers with a `View`.
            needs_key: Whether that route needs a key, for which the page asks.
        """
        template = (resources.files("jaxlora.serve") / "page.html").read_text("utf-8")
        values = {"kind": kind, "state": state, "keys": str(needs_key).lower()}
        text = _MARKS.sub(lambda found: html.escape(values[found[1]]), template)
        style, script = (_hash(text, tag) for tag in ("style", "script"))
        policy = (
            f"default-src 'none'; style-src {style}; script-src {script}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return Page(body=text.encode(), headers=headers)


def _hash(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    assert found is not None
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
