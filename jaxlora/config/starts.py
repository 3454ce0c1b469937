"""How the weights of an adapter start, `init_lora_weights`, in PEFT's words."""

import re
from typing import Any

from jaxlora.config.strict import Rule

# Starts of A and B in PEFT's words that are drawn at random.
_DRAWN_STARTS = True, "gaussian", "orthogonal"
LOFTQ, EVA = "loftq", "eva"
# Formats from whose error LoftQ starts, by the bits that PEFT names.
LOFTQ_FORMATS = {4: "nf4", 8: "int8"}
_PISSA = re.compile(r"pissa(?:_niter_([1-9]\d?))?")


def check_start(start: object) -> object:
    """Returns a value of `init_lora_weights` if there is such a start.

    Raises:
        ValueError: There is none.
    """
    known = (*_DRAWN_STARTS, LOFTQ, EVA)
    if start is False or not (start in known or is_part_of_weight(start)):
        raise ValueError(
            "expected true, gaussian, orthogonal, pissa, pissa_niter_N (with a number "
            "from 1 to 99), olora, loftq or eva."
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


def _start_fits(job: Any) -> tuple[str, str] | None:
    start = job.init_lora_weights
    if start is not True and job.init_from is not None:
        return "init_lora_weights", (
            "init_from gives the first weights: leave init_lora_weights out."
        )
    odd = [rank for rank in (job.rank, *job.rank_pattern.values()) if rank % 2]
    if start == "orthogonal" and odd:
        return "init_lora_weights", (
            f"init_lora_weights=orthogonal needs even ranks, and there is {odd[0]}."
        )
    if not is_part_of_weight(start):
        return None
    for setting, why in (
        ("dropout", "PEFT drops features in front of one half of the weight only"),
        ("weight_decay", "the kept first weights would decay"),
    ):
        if getattr(job, setting):
            return setting, (
                f"{setting} and init_lora_weights={start} cannot be combined: {why}. "
                f"Set {setting} to 0, or choose another start."
            )
    return None


def _loftq_has_its_settings(job: Any) -> tuple[str, str] | None:
    given = job.loftq_config
    if job.init_lora_weights != LOFTQ:
        return ("loftq_config", "it needs init_lora_weights: loftq.") if given else None
    if unknown := sorted(given.keys() - {"loftq_bits", "loftq_iter"}):
        return "loftq_config", (
            f"it has {unknown[0]!r}; its settings are loftq_bits and loftq_iter."
        )
    if (bits := given.get("loftq_bits", 4)) not in LOFTQ_FORMATS:
        return "loftq_config", f"loftq_bits={bits} must be 4 (nf4) or 8 (int8)."
    if (rounds := given.get("loftq_iter", 1)) > 1:
        return "loftq_config", (
            f"loftq_iter={rounds} would quantize the base anew for this adapter, and "
            "adapters share it. Set loftq_iter to 1, which starts from its error."
        )
    if job.use_dora:
        return "use_dora", (
            "use_dora and init_lora_weights=loftq cannot be combined: magnitudes start "
            "from the norms of the base without an adapter. Leave one of them out."
        )
    return None


# Settings of EVA, as in PEFT, with their defaults.
EVA_DEFAULTS = {
    "rho": 2.0,
    "tau": 0.99,
    "use_label_mask": True,
    "whiten": False,
    "adjust_scaling_factors": True,
}


def _eva_has_its_settings(job: Any) -> tuple[str, str] | None:
    given = job.eva_config
    if job.init_lora_weights != EVA:
        return ("eva_config", "it needs init_lora_weights: eva.") if given else None
    if unknown := sorted(given.keys() - EVA_DEFAULTS.keys()):
        return "eva_config", (
            f"it has {unknown[0]!r}; its settings are {', '.join(EVA_DEFAULTS)}."
        )
    for name, value in given.items():
        if isinstance(EVA_DEFAULTS[name], bool) != isinstance(value, bool):
            wanted = (
                "true or false" if isinstance(EVA_DEFAULTS[name], bool) else "a number"
            )
            return "eva_config", f"{name}={value} must be {wanted}."
    values = EVA_DEFAULTS | given
    if values["rho"] < 1 or values["tau"] > 1:
        return "eva_config", "rho must be at least 1, and tau at most 1."
    if not values["adjust_scaling_factors"] and values["rho"] > 1:
        return "eva_config", (
            "without adjust_scaling_factors the scaling of a linear would follow the "
            "rank that it gets. Leave it true, or set rho to 1 to keep the ranks."
        )
    return None


def _eva_fits(job: Any) -> tuple[str, str] | None:
    if job.init_lora_weights != EVA:
        return None
    if job.use_rslora and (EVA_DEFAULTS | job.eva_config)["rho"] > 1:
        return "use_rslora", (
            "with use_rslora the scaling of a linear would follow the rank that it "
            "gets. Set rho to 1 in eva_config, or leave use_rslora out."
        )
    for setting in ("use_dora", "train_bias"):
        if getattr(job, setting):
            return setting, (
                f"{setting} and init_lora_weights=eva cannot be combined: a linear "
                "that gets no rank has no adapter. Leave one of them out."
            )
    if job.data.is_stream:
        return "init_lora_weights", (
            "eva reads the first samples before training, and data are streamed. Give "
            "data a limit, or make the first weights in another job, and give its "
            "folder as init_from."
        )
    return None


START_RULES: tuple[Rule, ...] = (
    _start_fits,
    _loftq_has_its_settings,
    _eva_has_its_settings,
    _eva_fits,
)
