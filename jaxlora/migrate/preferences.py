"""Objectives that learn from preferences, from the settings of other tools."""

from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate.migration import Migration
from jaxlora.objectives.table import find_objective

# The name under which TRL's script loads the adapter that is the reference.
_REFERENCE = "ref_adapter_name"
_NO_COUNTERPART = (
    *("f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "use_weighting"),
    *("sync_ref_model", "discopop_tau", "rpo_alpha", "reference_free", "alpha"),
    *("loss_weights", "ref_model", "ref_model_adapters", "ref_model_name_or_path"),
    *("dpo_loss_weights", "dpo_use_weighting", "dpo_norm_loss", "pref_ftx"),
    *("pref_bco_weight", "ld_alpha", "reference_adapter", _REFERENCE),
)
# Values of these that change nothing.
_NEUTRAL = (None, False, 0, 0.0, "", "reverse_kl", [], {})
# Settings without effect on the result.
_LEFT_OUT = {
    "precompute_ref_log_probs": "Set objective_args.reference_logps: kept or in_step.",
    "precompute_ref_batch_size": "The batch is microbatch_tokens.",
    "max_prompt_length": "Only max_length cuts: at the end of the answer.",
    "max_completion_length": "Only max_length cuts: at the end of the answer.",
    "train_sampling_strategy": "Which answers KTO combines does not depend on it.",
    "disable_dropout": "Set dropout of the job.",
    "generate_during_eval": "Set samples of the run.",
    "ref_model_init_kwargs": "The reference is the base of the run.",
    "force_use_ref_model": "The reference is the base of the run.",
    "model_adapter_name": "The adapter in training is the job's.",
    "ref_model_quantization_bit": "The reference is on the base of the run.",
}
# Axolotl's settings of the objectives.
_OF_AXOLOTL = (
    *("rl_beta", "dpo_beta", "orpo_alpha", "dpo_loss_type", "dpo_label_smoothing"),
    *("cpo_alpha", "simpo_gamma", "kto_desirable_weight", "kto_undesirable_weight"),
    "center_rewards_coefficient",
)
# Losses of TRL's DPO trainer that are here.
_DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm")
_LOSSES = {
    "dpo": _DPO_LOSSES,
    "cpo": ("sigmoid", "hinge", "ipo"),
    "kto": ("kto", "apo_zero_unpaired"),
}
# Keys that only one trainer of TRL has.
_TELLING = {
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "reward": ("center_rewards_coefficient",),
}
_OF_LOSS = {"simpo": "cpo", "kto": "kto", "apo_zero_unpaired": "kto"}
# TRL's defaults that differ from those of its supervised training.
TRL_RATES = {"reward": 1e-4}
TRL_RATE = 1e-6
_SMOOTHED = (
    "objective_args.label_smoothing: TRL ignores it with the loss `sigmoid` since "
    "0.29, and here it is used, as before. Remove it, or choose loss_type: robust."
)


def trl_objective(given: Mapping[str, Any]) -> str | None:
    """Returns which trainer of TRL a file is for; None: supervised training."""
    for name, keys in _TELLING.items():
        if any(key in given for key in keys):
            return name
    loss = given.get("loss_type")
    if isinstance(loss, str) and loss in _OF_LOSS:
        return _OF_LOSS[loss]
    is_dpo = {"beta", "precompute_ref_log_probs", "label_smoothing", *_NO_COUNTERPART}
    is_dpo |= {"max_prompt_length", "max_completion_length"}
    return "dpo" if is_dpo & given.keys() or loss in _DPO_LOSSES else None


def set_trl(migration: Migration, name: str) -> None:
    """Sets the objective of a file for one of TRL's trainers.

    Args:
        migration: The settings.
        name: The trainer, from `trl_objective`.

    Raises:
        ConfigError: A setting has no counterpart.
    """
    if name == "dpo" and "loss_type" not in migration.given:
        migration.to_do.append(
            "objective: the file names no trainer, and is read as one for DPO. If it "
            "is for another one, set objective: orpo, cpo or kto."
        )
    args: dict[str, Any] = {}
    loss = migration.take("loss_type")
    if isinstance(loss, list) and len(loss) == 1:
        (loss,) = loss
    if name == "cpo" and loss == "simpo":
        name, loss = "simpo", None
        args |= {
            "beta": 0.1,
            "cpo_alpha": 1.0,
        }  # the defaults of CPO, which it is there
    if loss is not None and name != "reward":
        _check_loss(loss, _LOSSES[name])
        args["loss_type"] = loss
    for key in find_objective(name).settings.model_fields:
        value = migration.take(key)
        if value is not None:
            args[key] = value
    if name in ("dpo", "kto") and (adapter := migration.take(_REFERENCE)):
        args["reference"] = str(adapter)
        migration.to_do.append(
            "objective_args.reference: give the folder of the adapter that the script "
            f"loads as {adapter!r}; it may adapt other linears, with another rank."
        )
    is_sigmoid = name == "dpo" and args.get("loss_type", "sigmoid") == "sigmoid"
    if is_sigmoid and args.get("label_smoothing"):
        migration.to_do.append(_SMOOTHED)
    keeps_dropout = migration.take("disable_dropout") is False
    _finish(migration, name, args, has_dropout=keeps_dropout)
    if name == "reward":
        migration.job["too_long"] = "drop"  # as TRL does


def set_axolotl(migration: Migration) -> bool:
    """Sets the objective of `rl` or `reward_model`; returns whether there is one.

    Raises:
        ConfigError: It has no counterpart.
    """
    rl, is_reward = migration.take("rl"), migration.take("reward_model")
    if not rl and not is_reward:
        return False
    given = {key: migration.take(key) for key in _OF_AXOLOTL}
    loss = given["dpo_loss_type"]
    if isinstance(loss, list) and len(loss) == 1:
        (loss,) = loss
    name = "reward" if is_reward else str(rl).lower()
    if name == "ipo":
        name, loss = "dpo", "ipo"
    if name not in ("dpo", "orpo", "simpo", "kto", "reward"):
        raise ConfigError(
            f"rl is {rl!r}, which jaxlora does not train. Files with rl: dpo, ipo, "
            "orpo, simpo or kto can be converted."
        )
    beta = given["dpo_beta"] if given["rl_beta"] is None else given["rl_beta"]
    args: dict[str, Any] = {"beta": beta}
    if name == "dpo":
        if loss is not None:
            _check_loss(loss, _DPO_LOSSES)
        args |= {"loss_type": loss, "label_smoothing": given["dpo_label_smoothing"]}
        if args["label_smoothing"] and loss in (None, "sigmoid"):
            migration.to_do.append(_SMOOTHED)
    elif name == "simpo":  # it is CPO's, with the defaults of CPO
        found = {key: given[key] for key in ("cpo_alpha", "simpo_gamma")}
        found |= args
        args = {"beta": 0.1, "cpo_alpha": 1.0}
        args |= {key: value for key, value in found.items() if value is not None}
    elif name == "kto":
        for key in ("desirable_weight", "undesirable_weight"):
            args[key] = given[f"kto_{key}"]
    elif name == "orpo":
        args["beta"] = given["orpo_alpha"] if beta is None else beta
    else:
        args = {"center_rewards_coefficient": given["center_rewards_coefficient"]}
    _finish(migration, name, args, has_dropout=False)
    return True


def set_llama_factory(migration: Migration, stage: str) -> None:
    """Sets the objective of the stage dpo, kto or rm.

    Raises:
        ConfigError: A setting has no counterpart.
    """
    beta = migration.take("pref_beta", 0.1)
    loss, gamma = migration.take("pref_loss", "sigmoid"), migration.take("simpo_gamma")
    smoothing = migration.take("dpo_label_smoothing")
    weights = {
        "desirable_weight": migration.take("kto_chosen_weight"),
        "undesirable_weight": migration.take("kto_rejected_weight"),
    }
    args: dict[str, Any]
    if stage == "rm":
        name, args = "reward", {}
        migration.to_do.append(
            "objective: LLaMA-Factory's value head has a bias, and is saved apart. "
            "Here it is PEFT's `score`, without a bias."
        )
    elif stage == "kto":
        name, args = "kto", weights | {"beta": beta}
        migration.to_do.append(
            "objective: LLaMA-Factory combines the answers of KTO's baseline over 1000 "
            "records and shuffles them afterwards; here they are of one batch, as in "
            "TRL."
        )
    elif loss in ("orpo", "simpo"):
        name, args = loss, {"beta": beta}
        if name == "simpo":
            args["simpo_gamma"] = gamma
        else:
            migration.to_do.append(
                "objective: LLaMA-Factory's ORPO takes the mean loss of each chosen "
                "answer; here it is over all tokens of the chosen sequences, prompts "
                "included, as in TRL."
            )
    else:
        _check_loss(loss, ("sigmoid", "hinge", "ipo"))
        name, args = "dpo", {"beta": beta, "loss_type": loss}
        if loss == "sigmoid":
            args["label_smoothing"] = smoothing
    if name in ("dpo", "kto"):
        args["reference"] = _llama_factory_reference(migration)
    _finish(migration, name, args, has_dropout=name == "reward")


def _llama_factory_reference(migration: Migration) -> str | None:
    """Returns the adapter of a reference model that is the base; None: it has none.

    Other reference models stay among the settings, and are refused there.
    """
    key = "ref_model_adapters"
    adapters = migration.given.get(key)
    if not migration.given.get("ref_model"):
        if migration.take(key):
            migration.left_out[key] = "LLaMA-Factory reads it beside ref_model only."
        return None
    if migration.given["ref_model"] != migration.given.get("model_name_or_path"):
        return None
    if isinstance(adapters, str) and "," in adapters:
        return None
    migration.take("ref_model")
    found = migration.take(key)
    return None if found is None else str(found)


def _check_loss(loss: Any, known: tuple[str, ...]) -> None:
    if loss not in known:
        raise ConfigError(
            f"the loss {loss!r} has no counterpart in jaxlora. Files with one of "
            f"{', '.join(known)} can be converted."
        )


def _finish(
    migration: Migration, name: str, args: Mapping[str, Any], *, has_dropout: bool
) -> None:
    """Sets an objective, and refuses settings that change its loss.

    Args:
        migration: The settings.
        name: The objective.
        args: Its settings; None: not given.
        has_dropout: Whether the tool keeps dropout on.
    """
    for key in _NO_COUNTERPART:
        value = migration.take(key)
        if value not in _NEUTRAL:
            raise ConfigError(
                f"{key} is {value!r}, which changes the loss and has no counterpart in "
                f"jaxlora. Files with {key} cannot be converted."
            )
    for key, reason in _LEFT_OUT.items():
        if (value := migration.take(key)) not in (None, False):
            migration.left_out[key] = reason
    given = {key: value for key, value in args.items() if value is not None}
    find_objective(name).settings_of(given)
    migration.job["objective"] = name
    if given:
        migration.job["objective_args"] = given
    if not has_dropout:
        if migration.given.get("lora_dropout"):
            migration.left_out["lora_dropout"] = (
                f"{migration.tool} switches all dropout off for this training."
            )
        migration.given["lora_dropout"] = 0.0
    migration.to_do.append(
        "Means of the loss are over the global batch. "
        f"{migration.tool} takes them over each microbatch."
    )
