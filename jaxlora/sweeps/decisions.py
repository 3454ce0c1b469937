"""Records the evaluations of a sweep and decides which configurations end or wait.

A decision is made once, at the evaluation or the end that it follows from, and kept as
a record. It is never computed again: the order in which evaluations arrive from several
groups of devices differs from one run to the next.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxlora.config.sweep_config import ExitRule, Metric
from jaxlora.errors import CheckpointError
from jaxlora.sweeps.rules import (
    Curve,
    Decided,
    Stop,
    cut,
    is_awaited,
    is_late,
    judge,
    rungs,
)

# The configurations without their evaluations, in the order in which they are given.
# Each is looked at only when a rule needs it.
Standings = Mapping[str, Curve]


class Decisions:
    """The evaluations and decisions of a sweep.

    Attributes:
        points: (steps done, held-out loss) of each evaluation, by configuration.
        metrics: (steps done, value) of the sweep's metric of answers, if it has one.
        cutoffs: Highest loss that went on at each rung of halving that is decided.
        stops: The configurations that end early.
    """

    def __init__(self, rules: Sequence[ExitRule], metric: Metric | None = None):
        """Makes the object; without a metric, held-out losses are compared."""
        self.rules, self.metric = tuple(rules), metric or Metric()
        halving = [rule for rule in rules if rule.type == "halving"]
        self._halving: ExitRule | None = halving[0] if halving else None
        self._awaited: list[str] = []  # these had to come to a rung when last looked
        self._rungs: dict[int, list[int]] = {}  # of halving, by the number of steps
        self.points: dict[str, list[tuple[int, float]]] = {}
        self.metrics: dict[str, list[tuple[int, float]]] = {}
        self.cutoffs: list[float] = []
        self.stops: dict[str, Stop] = {}

    def note(
        self,
        evaluated: Iterable[tuple[str, int, float, float | None]],
        standings: Standings,
    ) -> Decided:
        """Decides after evaluations, and keeps both.

        Args:
            evaluated: (configuration, steps done, held-out loss, value of the sweep's
                metric of answers or None), in order.
            standings: All configurations.
        """
        stops, names = {}, []
        for name, step, loss, value in evaluated:
            self.keep(name, step, loss, value)
            names.append(name)
        if not self.rules:
            return Decided()
        curves = _Curves(self, standings)
        for name in names:
            stop = judge(name, curves, self.rules)
            if stop is None and self._halving is not None:
                stop = is_late(curves[name], self._halving, self.cutoffs)
            if stop is not None:
                stops[name] = stop
        self.stops |= stops
        found = self.review(standings)
        return Decided(cutoffs=found.cutoffs, stops={**stops, **found.stops})

    def review(self, standings: Standings) -> Decided:
        """Decides about the rungs to which all configurations have come."""
        rule, cutoffs, stops = self._halving, [], {}
        while rule is not None and len(self.cutoffs) < len(rungs(rule, 1)):
            curves = _Curves(self, standings)
            if self._awaits(curves, rule):
                break
            found = cut(curves, rule, len(self.cutoffs))
            if found is None:
                break
            cutoffs += found.cutoffs
            stops |= found.stops
            self.repeat(found)
        return Decided(cutoffs=tuple(cutoffs), stops=stops)

    def _awaits(self, curves: Mapping[str, Curve], rule: ExitRule) -> bool:
        """Whether a configuration has still to come to the next rung."""
        number = len(self.cutoffs)

        def awaits(name: str) -> bool:
            return name in curves and is_awaited(curves[name], rule, number)

        while self._awaited and not awaits(self._awaited[-1]):
            self._awaited.pop()
        if not self._awaited:
            self._awaited = [name for name in curves if awaits(name)]
        return bool(self._awaited)

    def keep(self, name: str, step: int, loss: float, value: float | None) -> None:
        """Keeps an evaluation; `value` is the sweep's metric of answers, if any."""
        self.points.setdefault(name, []).append((step, loss))
        if value is not None:
            self.metrics.setdefault(name, []).append((step, value))

    def repeat(self, decided: Decided) -> None:
        """Takes over a decision that was made before."""
        self.cutoffs += decided.cutoffs
        self.stops |= decided.stops

    def has(self, name: str, step: int) -> bool:
        """Whether a configuration was evaluated after so many steps."""
        return any(at == step for at, _ in self.points.get(name, ()))

    def waits(self, name: str, step: int, num_steps: int) -> bool:
        """Whether a configuration is to wait at a rung for the others."""
        rule = self._halving
        if rule is None or name in self.stops or not self.points.get(name):
            return False
        is_here = self.points[name][-1][0] == step
        return is_here and step in self._open_rungs(rule, num_steps)

    def num_allowed(self, name: str, step: int, num_steps: int) -> int:
        """Returns the number of steps after which a configuration may have to wait."""
        rule = self._halving
        if rule is None or name in self.stops:
            return num_steps
        if self.waits(name, step, num_steps):
            return step
        later = (at for at in self._open_rungs(rule, num_steps) if at > step)
        return min(later, default=num_steps)

    def _open_rungs(self, rule: ExitRule, num_steps: int) -> list[int]:
        """Returns the rungs that are not decided yet, in steps of a configuration."""
        if num_steps not in self._rungs:
            self._rungs[num_steps] = rungs(rule, num_steps)
        return self._rungs[num_steps][len(self.cutoffs) :]

    def curve(self, name: str, standing: Curve) -> Curve:
        """Returns what a configuration has shown so far."""
        stop = self.stops.get(name)
        is_stopped = stop is not None
        points: Sequence[tuple[int, float]] = self.points.get(name, ())
        losses = None
        if not self.metric.is_loss:
            values = self.metrics.get(name, ())
            points, losses = [(s, self.metric.cost(v)) for s, v in values], points
        return dataclasses.replace(
            standing,
            points=points,
            losses=losses,
            metric=self.metric,
            is_over=standing.is_over or is_stopped,
            has_failed=standing.has_failed or (is_stopped and stop.rule != "halving"),
        )


class _Curves(Mapping[str, Curve]):
    """The curves of configurations, each made when it is looked at."""

    def __init__(self, found: Decisions, standings: Standings):
        self._found, self._standings = found, standings

    def __getitem__(self, name: str) -> Curve:
        return self._found.curve(name, self._standings[name])

    def __contains__(self, name: object) -> bool:
        return name in self._standings

    def __iter__(self) -> Iterator[str]:
        return iter(self._standings)

    def __len__(self) -> int:
        return len(self._standings)


def halving_of(rules: Sequence[ExitRule]) -> dict[str, float] | None:
    """Returns what the rungs of halving follow from; None without that rule."""
    found = [{"eta": r.eta, "first": r.first} for r in rules if r.type == "halving"]
    return found[0] if found else None


def check_same_rungs(
    rules: Sequence[ExitRule], then: Mapping[str, float] | None, where: str
) -> None:
    """Refuses other rungs than those at which a sweep has begun to decide.

    Args:
        rules: The rules now.
        then: What the rungs followed from; None: there were none.
        where: Describes where `then` was read.

    Raises:
        CheckpointError: The rungs are others.
    """
    now = halving_of(rules)
    if now is None or then is None or now == dict(then):
        return
    words = lambda of: " and ".join(f"{key} {value:g}" for key, value in of.items())
    raise CheckpointError(
        f"early_exit: halving has {words(then)} in {where}, and {words(now)} now, but "
        "its rungs must not change once configurations are compared at them. Restore "
        "these values, set `early_exit: none` to compare no more, or choose another "
        "output_dir."
    )


def compared_steps(rules: Sequence[ExitRule], num_steps: int) -> set[int]:
    """Returns the optimizer steps at which a rule compares a configuration."""
    compares = [rule for rule in rules if rule.type in ("halving", "asha")]
    return {step for rule in compares for step in rungs(rule, num_steps)}
