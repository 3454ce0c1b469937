"""The rules by which configurations of a sweep end early, as pure functions of curves.

A curve is what a configuration has shown so far. Configurations are compared at equal
shares of their own steps, as their batch sizes may differ. No rule looks at a clock, so
a sweep that was interrupted decides the same when it is resumed.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxlora.config.sweep_config import ExitRule, Metric

_LOSS = Metric()
_MARGIN = 0.1  # nats above its first loss, from which a configuration diverges
_PATIENCE = 3  # evaluations that overfitting is judged by
_NOISES = 4.0  # noise units above its best, from which a configuration overfits
_LEAST_RISE = 0.02  # nats
_LEAST_EVALUATIONS = 9  # of a curve whose noise can be told
_LEAST_LOSSES = 2  # behind the first step, before a curve is compared with a median
_LOOKS = 3  # evaluations between two looks of catch-up, whose chances would add up


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The evaluations of a configuration so far.

    Attributes:
        num_steps: Its optimizer steps in all.
        step: Its optimizer steps done.
        points: (steps done, cost) of each evaluation, in order. The cost is the
            held-out loss in nats, or `Metric.cost` of another metric.
        losses: The held-out losses, if the cost is another one; None: they are it.
        metric: What the cost is of.
        is_over: Whether it has ended, for any reason.
        is_held: Whether the user has paused it, so that nobody waits for it.
        has_failed: Whether it ended by an error, or by a rule other than halving.
    """

    num_steps: int
    step: int
    points: Sequence[tuple[int, float]] = ()
    losses: Sequence[tuple[int, float]] | None = None
    metric: Metric = _LOSS
    is_over: bool = False
    is_held: bool = False
    has_failed: bool = False

    @property
    def held_out(self) -> list[float]:
        """The held-out losses, by which divergence and overfitting are judged."""
        return [x for _, x in (self.points if self.losses is None else self.losses)]

    def text(self, cost: float) -> str:
        """Returns a cost as the value of the metric."""
        return f"{self.metric.cost(cost):.3f}"

    @property
    def word(self) -> str:
        """Returns the name of the metric for a text."""
        return "held-out loss" if self.metric.is_loss else self.metric.name

    @property
    def best(self) -> float:
        """Lowest cost; infinite without an evaluation."""
        return min((loss for _, loss in self.points), default=math.inf)

    @property
    def is_finished(self) -> bool:
        """Whether it has done all of its steps."""
        return self.step >= self.num_steps

    def until(self, share: float) -> list[float]:
        """Returns the costs up to a share of its steps, without that before step 1."""
        last = share * self.num_steps * (1 + 1e-12)
        return [loss for step, loss in self.points if 0 < step <= last]

    def has_reached(self, share: float) -> bool:
        """Whether it was evaluated at or after a share of its steps."""
        return bool(self.points) and self.points[-1][0] >= share * self.num_steps

    def at(self, step: int) -> float | None:
        """Returns the cost after so many steps; None if it was not evaluated there."""
        return dict(self.points).get(step)

    def loss_at(self, step: int) -> float:
        """Returns the held-out loss after so many steps; infinite without one."""
        found = self.points if self.losses is None else self.losses
        return dict(found).get(step, math.inf)


class Stop(NamedTuple):
    """The decision to end a configuration.

    Attributes:
        rule: Name of the rule.
        reason: Text that says why, with the figures that were compared.
    """

    rule: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """The decisions that follow from an evaluation or an end.

    Attributes:
        cutoffs: Highest loss that goes on, for each rung that was decided.
        stops: The configurations that end, with the reasons.
    """

    cutoffs: tuple[float, ...] = ()
    stops: Mapping[str, Stop] = dataclasses.field(default_factory=dict)


def rungs(rule: ExitRule, num_steps: int) -> list[int]:
    """Returns the optimizer steps at which a configuration is compared."""
    shares = [rule.first]
    while shares[-1] * rule.eta < 1:
        shares.append(shares[-1] * rule.eta)
    return [max(1, math.ceil(share * num_steps - 1e-9)) for share in shares]


def judge(
    name: str, curves: Mapping[str, Curve], rules: Sequence[ExitRule]
) -> Stop | None:
    """Decides about a configuration that was just evaluated; halving is not asked.

    Divergence is always looked for.
    """
    if reason := _diverged(curves[name]):
        return Stop(rule="divergence", reason=reason)
    for rule in rules:
        if rule.type in _RULES and (reason := _RULES[rule.type](name, curves, rule)):
            return Stop(rule=rule.type, reason=reason)
    return None


def _diverged(curve: Curve) -> str:
    """At two evaluations in a row, it is worse than before its first step."""
    losses = curve.held_out
    if len(losses) < 3 or min(losses[-2:]) <= losses[0] + _MARGIN:
        return ""
    return (
        f"the held-out loss is {losses[-1]:.3f} after {losses[-2]:.3f}, and it began "
        f"at {losses[0]:.3f}"
    )


def _overfits(name: str, curves: Mapping[str, Curve], rule: ExitRule) -> str:
    """The last losses are above the best ones by more than the curve's own noise.

    The noise is the median deviation of the differences between evaluations from their
    median, which is 0.95 standard deviations of the losses if they are independent.
    """
    losses = curves[name].held_out
    if len(losses) < _LEAST_EVALUATIONS:
        return ""
    changes = [after - before for before, after in itertools.pairwise(losses[2:])]
    middle = statistics.median(changes)
    noise = 1.05 * statistics.median(abs(change - middle) for change in changes)
    count = len(losses) - _PATIENCE + 1
    means = [sum(losses[i : i + _PATIENCE]) / _PATIENCE for i in range(count)]
    rise, allowed = means[-1] - min(means), _LEAST_RISE + _NOISES * noise
    if rise <= allowed:
        return ""
    return (
        f"the mean of the last {_PATIENCE} held-out losses is {rise:.3f} above the "
        f"best mean, and the noise of the curve explains {allowed:.3f}"
    )


def _below_median(name: str, curves: Mapping[str, Curve], rule: ExitRule) -> str:
    """Its best loss is above the median of the others' mean losses so far.

    Source: `MedianStoppingRule` of Ray Tune, after Vizier (Golovin et al., 2017).
    """
    curve = curves[name]
    share = curve.points[-1][0] / curve.num_steps
    own = curve.until(share)
    others = [
        statistics.fmean(losses)
        for other, found in curves.items()
        if other != name and found.has_reached(share) and (losses := found.until(share))
    ]
    if len(others) < rule.startup or len(own) < _LEAST_LOSSES:
        return ""
    middle = statistics.median(others)
    if min(own) <= middle:
        return ""
    return (
        f"its best {curve.word} is {curve.text(min(own))}, and the median of the means "
        f"of {len(others)} others is {curve.text(middle)}"
    )


def _asha(name: str, curves: Mapping[str, Curve], rule: ExitRule) -> str:
    """At a rung, it is not in the best 1/eta of the others that came as far.

    Source: ASHA (arXiv 1810.05934) as in Ray Tune: without promotions, and a share of
    the losses recorded so far decides, interpolated linearly.
    """
    curve = curves[name]
    step, loss = curve.points[-1]
    for number, rung in enumerate(rungs(rule, curve.num_steps)):
        others = [
            found
            for other, c in curves.items()
            if other != name
            and (found := c.at(rungs(rule, c.num_steps)[number])) is not None
        ]
        if rung != step or not others:
            continue
        cutoff = _quantile(sorted(others), 1 / rule.eta)
        if loss > cutoff:
            return (
                f"its {curve.word} is {curve.text(loss)} at step {step} of "
                f"{curve.num_steps}, and the best 1/{rule.eta} of {len(others)} others "
                f"reached {curve.text(cutoff)} or better"
            )
    return ""


def _quantile(values: Sequence[float], share: float) -> float:
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def _cannot_catch_up(name: str, curves: Mapping[str, Curve], rule: ExitRule) -> str:
    """Too few that ran to their end have gained what it needs to join the best.

    With g of m such configurations that gained as much from here on, the probability is
    (1 + g) / (1 + m): a conformal p-value for one look at exchangeable curves.
    """
    curve = curves[name]
    step, _ = curve.points[-1]
    share = step / curve.num_steps
    if not step or len(curve.until(share)) % _LOOKS:
        return ""
    ended = [c for other, c in curves.items() if other != name and c.is_finished]
    best = sorted(c.best for c in curves.values() if c.points)
    need = curve.best - best[min(rule.top, len(best)) - 1]
    if need <= 0 or 1 / (1 + len(ended)) >= rule.probability:
        return ""
    gains = [min(c.until(share), default=math.inf) - c.best for c in ended]
    count = sum(gain >= need for gain in gains)
    chance = (1 + count) / (1 + len(ended))
    if chance >= rule.probability:
        return ""
    return (
        f"it needs {need:.3f} to join the best {rule.top}, and {count} of "
        f"{len(ended)} that ran to their end gained as much from here on "
        f"(probability {chance:.3f})"
    )


_RULES = {
    "overfitting": _overfits,
    "median": _below_median,
    "asha": _asha,
    "catch_up": _cannot_catch_up,
}


# ---- halving -----------------------------------------------------------------------


def is_awaited(curve: Curve, rule: ExitRule, number: int) -> bool:
    """Whether a rung of halving waits until a configuration comes to it."""
    step = rungs(rule, curve.num_steps)[number]
    is_there = curve.at(step) is not None or curve.step >= step
    return not (is_there or curve.is_over or curve.is_held)


def cut(curves: Mapping[str, Curve], rule: ExitRule, number: int) -> Decided | None:
    """Decides about a rung when all configurations have come as far.

    The best 1/eta go on, rounded up. Those that have failed on the way from the rung
    before take the last places. Of equal costs, that with the lower held-out loss is
    better, and then the one given first.

    Source: successive halving (arXiv 1502.07943) with a rung at a share of each
    configuration's own steps.

    Args:
        curves: The curves, in the order in which the configurations are given.
        rule: The rule.
        number: Number of the rung, from 0; those before are decided.

    Returns:
        The decision; None as long as a configuration that goes on is to come.
    """
    places = {name: rungs(rule, curve.num_steps) for name, curve in curves.items()}
    losses, held_out, num_lost = {}, {}, 0
    for name, curve in curves.items():
        step = places[name][number]
        loss = curve.at(step)
        if loss is not None:
            losses[name], held_out[name] = loss, curve.loss_at(step)
        elif is_awaited(curve, rule, number):
            return None
        elif curve.has_failed and curve.step <= step:
            before = places[name][number - 1] if number else None
            num_lost += before is None or curve.at(before) is not None
    if not losses:
        return None
    ranked = sorted(losses, key=lambda name: (losses[name], held_out[name]))
    num_in = len(ranked) + num_lost
    num_kept = min(len(ranked), math.ceil(num_in / rule.eta))
    cutoff = losses[ranked[num_kept - 1]]
    stops = {
        name: Stop(
            rule=rule.type,
            reason=f"place {place} of {num_in} at step {places[name][number]} of "
            f"{curves[name].num_steps}, with {curves[name].word} "
            f"{curves[name].text(losses[name])}; the best {num_kept}, up to "
            f"{curves[name].text(cutoff)}, go on",
        )
        for place, name in enumerate(ranked, 1)
        if place > num_kept and not curves[name].is_over
    }
    return Decided(cutoffs=(cutoff,), stops=stops)


def is_late(curve: Curve, rule: ExitRule, cutoffs: Sequence[float]) -> Stop | None:
    """Decides about a configuration that comes to a rung after the decision."""
    step, loss = curve.points[-1]
    for rung, cutoff in zip(rungs(rule, curve.num_steps), cutoffs, strict=False):
        if rung == step and loss > cutoff:
            return Stop(
                rule=rule.type,
                reason=f"its {curve.word} is {curve.text(loss)} at step {step} of "
                f"{curve.num_steps}, where those up to {curve.text(cutoff)} went on "
                "before",
            )
    return None
