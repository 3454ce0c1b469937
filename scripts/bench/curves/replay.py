"""Replays rules of early exit on recorded curves: what they save and lose."""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from jaxlora.config.sweep_config import ExitRule
from jaxlora.sweeps.rules import Curve, cut, is_late, judge, rungs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """Steps and losses of the configurations of a replayed sweep.

    Attributes:
        steps: Optimizer steps of each configuration until it ended, by name.
        losses: Lowest loss of each until then.
    """

    steps: Mapping[str, int]
    losses: Mapping[str, float]


def replay(
    curves: Mapping[str, Curve], rules: Sequence[ExitRule], slots: int
) -> Replayed:
    """Runs a sweep on curves that are known to their ends.

    Running configurations are evaluated in turn. One that ends, or that waits at a
    rung, makes room for the next one; those that went on at a rung come first.

    Args:
        curves: The whole curves, in the order in which they start.
        rules: The rules.
        slots: Configurations that run at once.

    Raises:
        ValueError: A rung is between two evaluations of a curve.
    """
    _check_rungs(curves, rules)
    halving = next((rule for rule in rules if rule.type == "halving"), None)
    seen = {n: dataclasses.replace(c, points=(), step=0) for n, c in curves.items()}
    position = dict.fromkeys(curves, -1)
    ready, running, parked = list(curves), [], []
    cutoffs: list[float] = []

    def end(name: str) -> None:
        seen[name] = dataclasses.replace(seen[name], is_over=True)

    def decide() -> None:
        """Decides about the rungs to which all have come."""
        while halving and len(cutoffs) < len(rungs(halving, 1)):
            found = cut(seen, halving, len(cutoffs))
            if found is None:
                return
            cutoffs.extend(found.cutoffs)
            for name in found.stops:
                end(name)
            on = [name for name in parked if name not in found.stops]
            ready[:0] = on
            parked.clear()

    while ready or running:
        while ready and len(running) < slots:
            running.append(ready.pop(0))
        for name in list(running):
            position[name] += 1
            whole, place = curves[name], position[name]
            step = whole.points[place][0]
            points = whole.points[: place + 1]
            seen[name] = dataclasses.replace(seen[name], points=points, step=step)
            stop = judge(name, seen, rules)
            if stop is None and halving is not None:
                stop = is_late(seen[name], halving, cutoffs)
            if stop is not None:
                failed = stop.rule != "halving"
                seen[name] = dataclasses.replace(seen[name], has_failed=failed)
            if stop is not None or place == len(whole.points) - 1:
                end(name)
                running.remove(name)
            elif halving and step in rungs(halving, whole.num_steps)[len(cutoffs) :]:
                running.remove(name)
                parked.append(name)
        decide()
    return Replayed(
        steps={name: curve.step for name, curve in seen.items()},
        losses={name: curve.best for name, curve in seen.items()},
    )


def _check_rungs(curves: Mapping[str, Curve], rules: Sequence[ExitRule]) -> None:
    for rule in rules:
        if rule.type not in ("halving", "asha"):
            continue
        for name, curve in curves.items():
            for step in rungs(rule, curve.num_steps):
                if curve.at(step) is None:
                    raise ValueError(
                        f"{name}: step {step} was not evaluated, and {rule.type} "
                        "compares there. Record with another --every."
                    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Savings and losses of a rule over some sweeps.

    Attributes:
        sweeps: Number of sweeps.
        saved: Mean share of the steps that were not made.
        best_lost: Sweeps that ended the best configuration before its lowest loss.
        top_3_lost: Sweeps that did so with one of the best three.
        mean_regret: Mean difference of the lowest loss found to the lowest one of all
            curves, in nats.
        most_regret: The largest one.
    """

    sweeps: int
    saved: float
    best_lost: int
    top_3_lost: int
    mean_regret: float
    most_regret: float


def count_losses(
    curves: Mapping[str, Curve],
    rules: Sequence[ExitRule],
    *,
    size: int,
    slots: int,
    sweeps: int,
) -> Counts:
    """Replays sweeps of random configurations in random orders.

    Args:
        curves: The recorded curves, each to its end.
        rules: The rules.
        size: Configurations of a sweep.
        slots: Configurations that run at once.
        sweeps: Number of sweeps.
    """
    rng = random.Random(0)
    saved, regrets, best_lost, top_lost = [], [], 0, 0
    for _ in range(sweeps):
        drawn = {name: curves[name] for name in rng.sample(list(curves), size)}
        found = replay(drawn, rules, slots)
        whole = sum(curve.num_steps for curve in drawn.values())
        saved.append(1 - sum(found.steps.values()) / whole)
        best = sorted(drawn, key=lambda name: drawn[name].best)
        lost = [found.losses[name] > drawn[name].best for name in best[:3]]
        best_lost += lost[0]
        top_lost += any(lost)
        regrets.append(min(found.losses.values()) - drawn[best[0]].best)
    return Counts(
        sweeps=sweeps,
        saved=sum(saved) / sweeps,
        best_lost=best_lost,
        top_3_lost=top_lost,
        mean_regret=sum(regrets) / sweeps,
        most_regret=max(regrets),
    )
