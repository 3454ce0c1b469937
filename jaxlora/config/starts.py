"""How the weights of an adapter start, `init_lora_weights`, in PEFT's words."""

import re
from typing import Any

from jaxlora.config.aliases import NO_LOFTQ
from jaxlora.config.strict import Wrong

# Starts of A and B in PEFT's words that are drawn at random.
_DRAWN_STARTS = True, "gaussian", "orthogonal"
_PISSA = re.compile(r"pissa(?:_niter_([1-9]\d?))?")


def check_start(start: object) -> object:
    """Returns a value of `init_lora_weights` if there is such a start.

    Raises:
        ValueError: There is none.
    """
    if start == "loftq":
        raise ValueError(f"there is no LoftQ. {NO_LOFTQ}")
    if start is False or not (start in _DRAWN_STARTS or is_part_of_weight(start)):
        raise ValueError(
            "expected true, gaussian, orthogonal, pissa, pissa_niter_N (with a number "
            "from 1 to 99) or olora."
        )
    return start


def is_part_of_weight(start: object) -> bool:
    """Whether A and B start from a part of the frozen weight, which has to be kept."""
    return start == "olora" or _is_pissa(start)


def _is_pissa(start: object) -> bool:
    return isinstance(start, str) and _PISSA.fullmatch(start) is not None


def num_power_iterations(start: str) -> int | None:
    """Returns N of `pissa_niter_N`; None for `pissa`."""
    found = _PISSA.fullmatch(start)
    assert found is not None
    return None if found[1] is None else int(found[1])


def start_rules(job: Any, wrong: Wrong) -> None:
    """Adds the settings that do not fit the start of a job's adapter."""
    start = job.init_lora_weights
    if job.clone_of is not None and job.continue_from is not None:
        wrong["clone_of"] = "give clone_of or continue_from, not both."
    if start is not True and job.init_from is not None:
        wrong["init_lora_weights"] = (
            "init_from gives the first weights: leave init_lora_weights out."
        )
    odd = [rank for rank in (job.rank, *job.rank_pattern.values()) if rank % 2]
    if start == "orthogonal" and odd:
        wrong["init_lora_weights"] = (
            f"init_lora_weights=orthogonal needs even ranks, and there is {odd[0]}."
        )
    for setting, why in (
        ("dropout", "PEFT drops features in front of one half of the weight only"),
        ("weight_decay", "the kept first weights would decay"),
    ):
        if is_part_of_weight(start) and getattr(job, setting):
            wrong[setting] = (
                f"{setting} and init_lora_weights={start} cannot be combined: {why}. "
                f"Set {setting} to 0, or choose another start."
            )
