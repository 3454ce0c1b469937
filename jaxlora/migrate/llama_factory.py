"""LLaMA-Factory's YAML."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxlora.config.aliases import STREAMING
from jaxlora.errors import ConfigError
from jaxlora.migrate import common, llama_factory_data, preferences, reasons, sources
from jaxlora.migrate.migration import Migration

_NO_INFERENCE = "`jaxlora generate` generates texts with an adapter."
_REASONS = {
    "template": reasons.OWN_TEMPLATE,
    "overwrite_cache": reasons.PREPARED,
    "tokenized_path": reasons.PREPARED,
    "streaming": STREAMING,
    "plot_loss": "losses.png is always written.",
    "flash_attn": reasons.KERNELS,
    "use_unsloth": reasons.KERNELS,
    "use_unsloth_gc": reasons.MEMORY,
    "disable_gradient_checkpointing": "remat is none by default.",
    "ddp_timeout": reasons.DEVICES,
    "create_new_adapter": "init_from continues the adapter of the folder.",
    "infer_backend": _NO_INFERENCE,
    "loraplus_lr_embedding": "Embeddings have no LoRA here.",
}
# Settings of training that is more than an adapter, with another loss, or none.
_OTHER_TRAINING = (
    *("export_dir", "use_galore", "use_apollo", "use_badam", "use_llama_pro"),
    *("use_dft_loss", "use_asft_loss", "use_eaft_loss", "mixture_of_depths"),
    *("use_kt", "use_mca"),
)


# Stages that learn from preferences, and from which.
_PREFERENCES: Mapping[str, Literal["pairs", "labels"]] = {
    "dpo": "pairs",
    "rm": "pairs",
    "kto": "labels",
}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts LLaMA-Factory's settings.

    Raises:
        ConfigError: They are of training that jaxlora does not do.
    """
    migration = Migration(tool="LLaMA-Factory", given=given)
    stage = migration.take("stage", "sft")
    kind = migration.take("finetuning_type", "lora")
    if kind != "lora" or stage not in ("sft", "pt", *_PREFERENCES):
        raise ConfigError(
            f"finetuning_type is {kind!r} and stage is {stage!r}, and jaxlora trains "
            "LoRA adapters on given answers. Only files with finetuning_type: lora and "
            "stage: sft, pt, dpo, kto or rm can be converted."
        )
    if stage in _PREFERENCES:
        preferences.set_llama_factory(migration, stage)
    for key in _OTHER_TRAINING:
        if migration.take(key):
            raise ConfigError(
                f"{key} is set, and jaxlora trains LoRA adapters with the usual loss. "
                f"Files with {key} cannot be converted."
            )
    migration.run["model"] = migration.take("model_name_or_path")
    common.set_output(migration, "saves/lora")
    common.set_quantized_base(migration, migration.take("quantization_bit"))
    common.note_quantization_method(migration, "quantization_method")
    job = migration.job
    _set_data(migration, stage)
    if migration.take("enable_thinking", True) is False:
        off = {"enable_thinking": False}
        common.set_template_kwargs(migration, "enable_thinking", off)
    _set_adapter(migration)
    job["max_length"] = migration.take("cutoff_len", 2048)
    job |= common.TRANSFORMERS
    job["learning_rate"] = migration.take("learning_rate", job["learning_rate"])
    job["epochs"] = migration.take("num_train_epochs", job["epochs"])
    common.set_schedule(migration, "lr_scheduler_type", job["lr_schedule"])
    samples = common.set_batch(migration, "per_device_train_batch_size", 8)
    if migration.take("packing") or migration.take("neat_packing") or stage == "pt":
        common.note_packing(migration, samples)
    common.set_optimizer(migration, "optim")
    common.set_trackers(migration)
    common.take_trainer_rest(migration, _REASONS)
    return migration


def _set_data(migration: Migration, stage: str) -> None:
    folder = str(migration.take("dataset_dir", "data"))
    on_all = migration.take("train_on_prompt") is True
    limit = migration.take("max_samples")
    on_last, mix = migration.take("mask_history") is True, _mix(migration)
    job = migration.job
    for key, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        names = migration.take(key, "records" if ours == "data" else None)
        if names is None:
            continue
        data = job[ours] = llama_factory_data.take_data(
            migration,
            key,
            names,
            folder,
            is_text=stage == "pt",
            preferences=_PREFERENCES.get(stage),
            mix=mix if ours == "data" else {},
        )
        for one in sources.sets_of(data):
            if (on_all or on_last) and stage == "sft":
                one["loss_on"] = "all" if on_all else "last"
            if limit:
                one["limit"] = limit
        _check_shares(migration, data)
    common.set_held_out_share(migration, "val_size")


_STRATEGIES = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}


def _mix(migration: Migration) -> dict[str, Any]:
    """Returns how several data sets are mixed."""
    strategy = str(migration.take("mix_strategy", "concat"))
    shares = migration.take("interleave_probs")
    if strategy not in _STRATEGIES:
        if strategy != "concat":
            migration.left_out["mix_strategy"] = f"{strategy!r} is not known."
        if shares:
            migration.left_out["interleave_probs"] = "mix_strategy is concat."
        return {}
    mix: dict[str, Any] = {"mix": "interleave"}
    if shares:
        given = shares if isinstance(shares, list) else str(shares).split(",")
        try:
            mix["probabilities"] = [float(share) for share in given]
        except (TypeError, ValueError):
            migration.left_out["interleave_probs"] = f"{shares!r}: give numbers."
    return mix | {"stopping_strategy": _STRATEGIES[strategy]}


def _check_shares(migration: Migration, data: dict[str, Any]) -> None:
    """Leaves out shares of data sets that are not as many."""
    shares, num = data.get("probabilities"), len(data.get("datasets", ()))
    if shares is not None and len(shares) != num:
        del data["probabilities"]
        migration.left_out["interleave_probs"] = (
            f"there are {len(shares)} shares, and {num} files or data sets. Set "
            "probabilities beside datasets."
        )


def _set_adapter(migration: Migration) -> None:
    job = migration.job
    job["rank"] = rank = migration.take("lora_rank", 8)
    twice = 2 * rank if isinstance(rank, int) else None
    job["lora_alpha"] = migration.take("lora_alpha", twice)
    job["dropout"] = migration.take("lora_dropout", 0.0)
    iterations = migration.take("pissa_iter", 16)
    if migration.take("pissa_init"):
        job["init_lora_weights"] = (
            "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
        )
        migration.given.pop("pissa_convert", None)  # it is always converted
    targets = migration.take("lora_target", "all")
    if isinstance(targets, str):
        targets = [name.strip() for name in targets.split(",")]
    job["target_modules"] = "all-linear" if targets == ["all"] else targets
    common.set_start(migration, migration.take("adapter_name_or_path"))
