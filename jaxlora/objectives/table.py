"""The table of objectives.

An entry of `OBJECTIVES` is all that packing, training and evaluation know of one. The
model gives the negative log likelihood of the next token of every row that an objective
asks for; the objective turns them into losses. Jobs of several objectives share
microbatches: each row belongs to one job, and so to one objective.
"""

from collections.abc import Mapping, Sequence

from jaxlora.errors import ConfigError
from jaxlora.objectives.base import Objective
from jaxlora.objectives.datum import DATUM
from jaxlora.objectives.distill import DISTILL
from jaxlora.objectives.kto import KTO
from jaxlora.objectives.next_token import NEXT_TOKEN
from jaxlora.objectives.preference import CPO, DPO, ORPO, SIMPO
from jaxlora.objectives.reward import REWARD

_ALL = (NEXT_TOKEN, DPO, SIMPO, CPO, ORPO, KTO, REWARD, DISTILL, DATUM)
OBJECTIVES: dict[str, Objective] = {one.name: one for one in _ALL}


def has_baseline(objectives: Sequence[str]) -> bool:
    """Whether a run with some objectives has baselines of global batches."""
    return any(OBJECTIVES[name].baseline is not None for name in objectives)


def has_reference(objectives: Sequence[str]) -> bool:
    """Whether an objective of a run compares with a reference."""
    return any(OBJECTIVES[name].needs_reference for name in objectives)


def has_groups(objectives: Sequence[str]) -> bool:
    """Whether an objective of a run reads the groups of rows."""
    read = (OBJECTIVES[name] for name in objectives)
    return any(one.group_size > 1 or one.sums_groups for one in read)


def reads_rows(objectives: Sequence[str]) -> bool:
    """Whether likelihoods of rows are results of training."""
    return any(OBJECTIVES[name].is_read is not None for name in objectives)


def find_objective(name: str) -> Objective:
    """Returns the objective of jobs that has a name.

    Raises:
        ConfigError: There is none of this name.
    """
    known = [
        one for one in OBJECTIVES if one != DATUM.name
    ]  # a job has data, not calls
    if name not in known:
        raise ConfigError(
            f"objective={name!r} must be one of {', '.join(known)}. One of your "
            "own is registered with jaxlora.register_objective, in each process that "
            "trains."
        )
    return OBJECTIVES[name]


def smallest_batch(objective: str, args: Mapping[str, float | str]) -> int:
    """Returns the fewest groups of samples that a global batch may have.

    A baseline is made from the prompts of a batch with the answers of its other
    samples. With a single sample, it would be the sample's own log-ratio.

    Args:
        objective: Name of the objective.
        args: Values of some of its settings.

    Raises:
        ConfigError: There is no such objective, or it has no such settings.
    """
    found = find_objective(objective)
    settings = found.settings_of(args)
    has_baseline = found.baseline is not None and found.needs_baseline(settings)
    return 2 if has_baseline else 1
