"""Objectives that learn from preferences, from the settings of other tools."""

from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate.migration import Migration, Refused, Table
from jaxlora.migrate.reasons import by_key
from jaxlora.objectives.table import find_objective

# The name under which TRL's script loads the adapter that is the reference.
_REFERENCE = "ref_adapter_name"
_TABLE: Table = by_key(
    {
        Refused(
            "which changes the loss and has no counterpart in jaxlora",
            neutral="reverse_kl",
        ): "f_divergence_type f_alpha_divergence_coef ld_alpha use_weighting "
        "sync_ref_model discopop_tau rpo_alpha reference_free alpha loss_weights "
        "ref_model ref_model_adapters ref_model_name_or_path dpo_loss_weights "
        "dpo_use_weighting dpo_norm_loss pref_ftx pref_bco_weight reference_adapter "
        f"{_REFERENCE}",
        "Set objective_args.reference_logps: kept or in_step.": (
            "precompute_ref_log_probs"
        ),
        "The batch is microbatch_tokens.": "precompute_ref_batch_size",
        "Only max_length cuts: at the end of the answer.": (
            "max_prompt_length max_completion_length"
        ),
        "Which answers KTO combines does not depend on it.": "train_sampling_strategy",
        "Set dropout of the job.": "disable_dropout",
        "Set samples of the run.": "generate_during_eval",
        "The reference is the base of the run.": (
            "ref_model_init_kwargs force_use_ref_model"
        ),
        "The adapter in training is the job's.": "model_adapter_name",
        "The reference is on the base of the run.": "ref_model_quantization_bit",
    }
)
# The losses of each objective that are here.
_LOSSES = {
    "dpo": ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "kto": ("kto", "apo_zero_unpaired"),
}
# Keys, and losses, that only one trainer of TRL has.
_TELLING = {
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "reward": ("center_rewards_coefficient",),
}
_OF_LOSS = {"simpo": "cpo", "kto": "kto", "apo_zero_unpaired": "kto"}
_OF_DPO = {
    *("beta", "label_smoothing", "precompute_ref_log_probs"),
    *("max_prompt_length", "max_completion_length"),
    *(key for key, entry in _TABLE.items() if isinstance(entry, Refused)),
}
# The defaults of CPO, which SimPO is there.
_SIMPO: dict[str, Any] = {"beta": 0.1, "cpo_alpha": 1.0}
# Our names of Axolotl's and LLaMA-Factory's settings of the objectives that have them.
_AXOLOTL = {
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_loss_type": "loss_type",
    "dpo_label_smoothing": "label_smoothing",
    "cpo_alpha": "cpo_alpha",
    "simpo_gamma": "simpo_gamma",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "center_rewards_coefficient": "center_rewards_coefficient",
}
_LLAMA_FACTORY = {
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "dpo_label_smoothing": "label_smoothing",
    "simpo_gamma": "simpo_gamma",
}
# Those of one objective only, although others have a setting of our name.
_OF_ONE = dict.fromkeys(("dpo_loss_type", "dpo_label_smoothing", "pref_loss"), "dpo")
_OF_ONE["orpo_alpha"] = "orpo"
_SMOOTHED = (
    "objective_args.label_smoothing: TRL ignores it with the loss `sigmoid` since "
    "0.29, and here it is used, as before. Remove it, or choose loss_type: robust."
)
# How LLaMA-Factory computes some objectives otherwise.
_OTHERWISE = {
    "reward": "objective: LLaMA-Factory's value head has a bias, and is saved apart. "
    "Here it is PEFT's `score`, without a bias.",
    "kto": "objective: LLaMA-Factory combines the answers of KTO's baseline over 1000 "
    "records and shuffles them afterwards; here they are of one batch, as in TRL.",
    "orpo": "objective: LLaMA-Factory's ORPO takes the mean loss of each chosen "
    "answer; here it is over all tokens of the chosen sequences, prompts included, as "
    "in TRL.",
}


def set_trl(migration: Migration) -> None:
    """Sets the objective of a file for one of TRL's trainers, if it is for one.

    Raises:
        ConfigError: A setting has no counterpart.
    """
    name = _trl_trainer(migration.given)
    if name is None:
        return
    if name == "dpo" and "loss_type" not in migration.given:
        migration.to_do.append(
            "objective: the file names no trainer, and is read as one for DPO. If it "
            "is for another one, set objective: orpo, cpo or kto."
        )
    args: dict[str, Any] = {}
    loss = _only(migration.take("loss_type"))
    if name == "cpo" and loss == "simpo":
        name, loss, args = "simpo", None, dict(_SIMPO)
    if loss is not None and name != "reward":
        args["loss_type"] = _known_loss(loss, _LOSSES[name])
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
    keeps_dropout = migration.take("disable_dropout") is False
    _finish(migration, name, args, has_dropout=keeps_dropout)
    # TRL's own rates, and what it does with long samples.
    rate = 1e-4 if name == "reward" else 1e-6
    migration.given["learning_rate"] = migration.take("learning_rate", rate)
    if name == "reward":
        migration.job["too_long"] = "drop"


def _trl_trainer(given: Mapping[str, Any]) -> str | None:
    """Returns which trainer of TRL a file is for; None: supervised training."""
    for name, keys in _TELLING.items():
        if any(key in given for key in keys):
            return name
    loss = given.get("loss_type")
    if isinstance(loss, str) and loss in _OF_LOSS:
        return _OF_LOSS[loss]
    return "dpo" if _OF_DPO & given.keys() or loss in _LOSSES["dpo"] else None


def set_axolotl(migration: Migration, _: str, rl: Any) -> None:
    """Sets the objective of `rl` or `reward_model`, if there is one.

    Raises:
        ConfigError: It has no counterpart.
    """
    is_reward = migration.take("reward_model")
    if not rl and not is_reward:
        return
    name = "reward" if is_reward else str(rl).lower()
    is_ipo = name == "ipo"
    name = "dpo" if is_ipo else name
    if name not in ("dpo", "orpo", "simpo", "kto", "reward"):
        raise ConfigError(
            f"rl is {rl!r}, which jaxlora does not train. Files with rl: dpo, ipo, "
            "orpo, simpo or kto can be converted."
        )
    args = _take_args(migration, _AXOLOTL, name)
    if name == "dpo":
        loss = "ipo" if is_ipo else _only(args.get("loss_type"))
        args["loss_type"] = loss and _known_loss(loss, _LOSSES["dpo"])
    elif name == "simpo":
        args = _SIMPO | args
    _finish(migration, name, args, has_dropout=False)


def set_llama_factory(migration: Migration, stage: str) -> None:
    """Sets the objective of the stage dpo, kto or rm.

    Raises:
        ConfigError: A setting has no counterpart.
    """
    for key, default in (("pref_beta", 0.1), ("pref_loss", "sigmoid")):
        migration.given[key] = migration.take(key, default)
    loss = migration.given["pref_loss"]
    name = {"rm": "reward"}.get(stage, stage)
    if name == "dpo" and loss in ("orpo", "simpo"):
        name = loss
    args = _take_args(migration, _LLAMA_FACTORY, name)
    if name == "dpo" and _known_loss(loss, ("sigmoid", "hinge", "ipo")) != "sigmoid":
        args.pop("label_smoothing", None)
    if name in _OTHERWISE:
        migration.to_do.append(_OTHERWISE[name])
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


def _take_args(
    migration: Migration, names: Mapping[str, str], objective: str
) -> dict[str, Any]:
    """Takes the settings of all objectives; returns those of one, by our names."""
    own, args = find_objective(objective).settings.model_fields, {}
    for key, ours in names.items():
        value = migration.take(key)
        if value is None or ours not in own or objective != _OF_ONE.get(key, objective):
            continue
        args.setdefault(ours, value)
    return args


def _only(loss: Any) -> Any:
    return loss[0] if isinstance(loss, list) and len(loss) == 1 else loss


def _known_loss(loss: Any, known: tuple[str, ...]) -> str:
    if loss in known:
        return loss
    raise ConfigError(
        f"the loss {loss!r} has no counterpart in jaxlora. Files with one of "
        f"{', '.join(known)} can be converted."
    )


def _finish(
    migration: Migration, name: str, args: Mapping[str, Any], *, has_dropout: bool
) -> None:
    """Sets an objective, and refuses settings that change its loss."""
    given = {key: value for key, value in args.items() if value is not None}
    is_sigmoid = name == "dpo" and given.get("loss_type", "sigmoid") == "sigmoid"
    is_trls = migration.tool != "LLaMA-Factory"
    if is_trls and is_sigmoid and given.get("label_smoothing"):
        migration.to_do.append(_SMOOTHED)
    migration.convert(_TABLE)
    for key, reason in _TABLE.items():
        if isinstance(reason, str) and migration.take(key) not in (None, False):
            migration.left_out[key] = reason
    find_objective(name).settings_of(given)
    migration.objective = migration.job["objective"] = name
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
