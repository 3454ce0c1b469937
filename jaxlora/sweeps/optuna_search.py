"""Suggestions of Optuna's TPE, as a pure function of the results so far.

Optuna keeps nothing: for each suggestion, a fresh study in memory gets the results, and
a seed of its own. So a run that is resumed suggests what it would have suggested.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from jaxlora.config.space import Axis
from jaxlora.errors import ConfigError

_STARTUP = 5  # results from which TPE is used; before, it draws at random


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A configuration that was tried, or is being tried.

    Attributes:
        place: Its place on each axis, by name.
        state: `running`; `complete`; or `pruned`: it ended early.
        step: Optimizer steps done.
        cost: What is lower for better ones; None: it is not known.
    """

    place: Mapping[str, float]
    state: Literal["running", "complete", "pruned"]
    step: int = 0
    cost: float | None = None


def check_installed() -> None:
    """Checks that Optuna is installed.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "sweep.method: optuna needs the package optuna, which is not installed. "
            "Run: pip install 'jaxlora[optuna]', or set `method: random`."
        )


def suggestions(
    axes: Sequence[Axis], seed: int, number: int, tried: Sequence[Tried]
) -> Iterator[dict[str, float]]:
    """Yields places on the axes, the most promising first, without an end.

    Args:
        axes: The axes.
        seed: Random seed of the search.
        number: Number of configurations before this suggestion.
        tried: Those that were suggested or drawn so far, in their order.
    """
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
    )
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, BaseDistribution] = {
        axis.name: FloatDistribution(0.0, 1.0)
        if axis.space.values is None
        else CategoricalDistribution(list(range(len(axis.space.values))))
        for axis in axes
    }
    sampler = optuna.samplers.TPESampler(
        seed=1_000_003 * seed + number, n_startup_trials=_STARTUP, constant_liar=True
    )
    study = optuna.create_study(sampler=sampler)
    states = {
        "running": TrialState.RUNNING,
        "complete": TrialState.COMPLETE,
        "pruned": TrialState.PRUNED,
    }
    for one in tried:
        is_pruned = one.state == "pruned" and one.cost is not None
        values = {one.step: one.cost} if is_pruned and one.cost is not None else {}
        place = {
            axis.name: one.place[axis.name]
            if axis.space.values is None
            else int(one.place[axis.name])
            for axis in axes
        }
        trial = create_trial(
            params=place,
            distributions=space,
            state=states[one.state],
            value=one.cost if one.state == "complete" else None,
            intermediate_values=values,
        )
        study.add_trial(trial)
    while True:
        yield dict(study.ask(space).params)
