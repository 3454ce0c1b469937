"""LLaMA-Factory's YAML, and the data sets that its dataset_info.json describes."""

import dataclasses
import pathlib
from typing import Any

from jaxlora.common.json_file import read_json_file
from jaxlora.config.aliases import STREAMING
from jaxlora.errors import ConfigError
from jaxlora.migrate import data, preferences, reasons, trainer
from jaxlora.migrate.migration import Migration, Refused, Table, To
from jaxlora.migrate.reasons import by_key

_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_LABEL = {"kto_tag": "label"}
_MEDIA = ("images", "videos", "audios")
_ROLE_OF_TAG = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}
_STRATEGIES = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts LLaMA-Factory's settings.

    Raises:
        ConfigError: They are of training that jaxlora does not do.
    """
    migration = Migration(tool="LLaMA-Factory", given=given)
    migration.convert(_TABLE)
    return trainer.finish(migration, _TABLE)


def _set_stage(migration: Migration, _: str, stage: str) -> None:
    kind = migration.take("finetuning_type", "lora")
    if kind != "lora" or stage not in ("sft", "pt", "dpo", "rm", "kto"):
        raise ConfigError(
            f"finetuning_type is {kind!r} and stage is {stage!r}, and jaxlora trains "
            "LoRA adapters on given answers. Only files with finetuning_type: lora and "
            "stage: sft, pt, dpo, kto or rm can be converted."
        )
    migration.is_text = stage == "pt"
    if stage not in ("sft", "pt"):
        preferences.set_llama_factory(migration, stage)


def _set_quantized(migration: Migration, key: str, bits: Any) -> None:
    if bits in (4, 8):
        migration.run["quantize_base"] = {4: "nf4", 8: "int8"}[bits]
    elif bits is not None:
        migration.left_out[key] = trainer.not_quantized(f"{bits} bits")


def _note_quantization_method(migration: Migration, key: str, method: Any) -> None:
    if method is not None:
        is_nf4 = str(method).lower() in ("bnb", "bitsandbytes", "nf4")
        other = trainer.not_quantized(method)
        migration.left_out[key] = reasons.NF4 if is_nf4 else other


def _set_data(migration: Migration, _: str, folder: Any) -> None:
    folder = str(folder)
    on_all = migration.take("train_on_prompt") is True
    on_last = migration.take("mask_history") is True
    limit, mix, job = migration.take("max_samples"), _mix(migration), migration.job
    for key, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        names = migration.take(key, "records" if ours == "data" else None)
        if names is None:
            continue
        names = names if isinstance(names, list) else str(names).split(",")
        names = [name for one in names if (name := str(one).strip())]
        sets = [
            one
            for name in names or ["records"]
            for one in _take_sets(migration, key, name, folder)
        ]
        job[ours] = data.join(sets, **(mix if ours == "data" else {}))
        for one in sets:
            if (on_all or on_last) and not (migration.is_text or migration.objective):
                one["loss_on"] = "all" if on_all else "last"
            if limit:
                one["limit"] = limit
    shares, num = job["data"].get("probabilities"), len(job["data"].get("datasets", ()))
    if shares is not None and len(shares) != num:
        del job["data"]["probabilities"]
        migration.left_out["interleave_probs"] = (
            f"there are {len(shares)} shares, and {num} files or data sets. Set "
            "probabilities beside datasets."
        )


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


def _take_sets(
    migration: Migration, key: str, name: str, folder: str
) -> list[dict[str, Any]]:
    """Converts the name of a data set, which is one for each of its files."""
    entry = {"hf_hub_url": name} if folder == "ONLINE" else _look_up(folder, name)
    if entry is not None:
        columns = entry.get("columns")
        columns = columns if isinstance(columns, dict) else {}
        one = migration.part(f"{key}: {name}", columns)
        found = _take_sources(one, entry, folder)
        (_take_preferences if migration.objective else _take_answers)(one, entry)
        _take_columns(one)
        return [source | one.job for source in found]
    setting = "data" if key == "dataset" else "eval_data"
    migration.to_do.append(
        f"{setting}.path: look up {name!r} in {folder}/dataset_info.json, and give "
        "its file or hub id. LLaMA-Factory renders all records by a chat template: for "
        "records with instruction, input and output, set kind: alpaca and chat: true."
    )
    kind = {"kind": "text"} if migration.is_text else {}
    return [{"path": f"{folder}/{name}.json"} | kind]


def _look_up(folder: str, name: str) -> dict[str, Any] | None:
    """Returns the description of a data set; None if there is none."""
    path = pathlib.Path(folder) / "dataset_info.json"
    try:
        found = read_json_file(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # without the path
        raise ConfigError(f"{path} cannot be read: {why}. Correct it.") from error
    entry = found.get(name) if isinstance(found, dict) else None
    return entry if isinstance(entry, dict) else None


def _take_sources(
    one: Migration, entry: dict[str, Any], folder: str
) -> list[dict[str, Any]]:
    dataset = {"split": entry.get("split"), "path": "records.jsonl"}
    if hub_id := entry.get("hf_hub_url"):
        dataset |= {"path": hub_id, "name": entry.get("subset")}
    elif file := entry.get("file_name"):
        dataset["path"] = str(pathlib.PurePath(folder, str(file)))
    else:
        one.to_do.append(
            f"data.path: {one.where} is in none of a file and the Hugging Face hub. "
            "Download it, and give the file."
        )
    found = data.take_sources(dataclasses.replace(one, given=dataset), "train")
    limit = entry.get("num_samples")
    return [source | {"limit": limit} if limit else source for source in found]


def _take_answers(one: Migration, entry: dict[str, Any]) -> None:
    """Takes the columns of answers without preferences."""
    if entry.get("ranking") or "kto_tag" in one.given:
        raise ConfigError(
            f"{one.where} has records with preferences, which supervised training does "
            "not learn from. Set stage: dpo, kto or rm, or give other records."
        )
    if entry.get("formatting", "alpaca") != "alpaca":
        one.job |= _conversations(one, entry)
    else:
        is_default = not isinstance(entry.get("columns"), dict)
        used = _ALPACA if is_default else {k: one.take(k) for k in _ALPACA}
        one.job |= _instructions(one, used)


def _take_preferences(one: Migration, entry: dict[str, Any]) -> None:
    """Takes the columns of pairs, or of answers with labels."""
    is_pairs = one.objective != "kto"
    has_pairs = bool(entry.get("ranking"))
    if has_pairs != is_pairs:
        raise ConfigError(
            f"{one.where} has ranking: {str(has_pairs).lower()}, and the stage of the "
            f"file learns from {'pairs' if is_pairs else 'labels'}. Give other records."
        )
    names = {"chosen": "chosen", "rejected": "rejected"} if is_pairs else _LABEL
    for name, ours in names.items():
        if field := one.take(name):
            one.job[ours] = str(field)
    if entry.get("formatting", "alpaca") != "alpaca":
        talk = _conversations(one, entry)
        one.job["prompt" if is_pairs else "messages"] = talk["messages"]
        one.job |= {key: talk[key] for key in ("roles",) if key in talk}
        return
    used = {k: one.take(k) for k in _ALPACA} if one.given else dict(_ALPACA)
    used["response"] = used["response"] or "output"
    asked = _instructions(one, used)
    if asked["kind"] == "alpaca":
        asked = {"prompt": "{{ instruction }}\n{{ input }}", "completion": "output"}
    one.job |= {"prompt": asked["prompt"], "chat": True}
    if not is_pairs:
        one.job["completion"] = asked["completion"]


def _take_columns(one: Migration) -> None:
    """Takes the columns that are neither prompts nor answers."""
    field = one.take("system")
    if field and one.job.get("kind") == "text":
        one.leave_out("system", f"{field}: texts have no such message.")
    elif field:
        one.job["system"] = str(field)
    for column, field in one.given.items():
        if column in _MEDIA:
            one.leave_out(column, reasons.TEXT_ONLY)
        elif (field and field != column) or column == "history":
            text = f"{field}: put it into the messages or the prompts of the records."
            one.leave_out(column, text)


def _instructions(migration: Migration, used: dict[str, Any]) -> dict[str, Any]:
    prompt, query = str(used["prompt"] or "instruction"), used["query"]
    if migration.is_text or not used["response"]:
        if not migration.is_text:
            migration.to_do.append(
                "data.kind: there is no field of answers, so the records are read as "
                "text."
            )
        return {"kind": "text", "text": prompt}
    if used == _ALPACA:
        return {"kind": "alpaca", "chat": True}
    if query:
        names = {"prompt": prompt, "query": str(query)}
        both = data.template_of("{prompt}\n{query}", names)
        alone = data.template_of("{prompt}", names)
        if both is None or alone is None:
            migration.to_do.append(
                f"data.prompt: give a template of the fields {prompt!r} and {query!r}."
            )
        else:
            prompt = data.with_input(both, alone, str(query))
    return {
        "kind": "prompt_completion",
        "prompt": prompt,
        "completion": used["response"],
        "chat": True,
    }


def _conversations(one: Migration, entry: dict[str, Any]) -> dict[str, Any]:
    tags = entry.get("tags")
    tags = tags if isinstance(tags, dict) else {}
    fields = {"role": tags.get("role_tag"), "content": tags.get("content_tag")}
    if any(fields.values()):
        data.note_fields(one, {k: str(v) for k, v in fields.items()})
    speakers = {role: [tags[t]] for t, role in _ROLE_OF_TAG.items() if tags.get(t)}
    field = str(one.take("messages", "conversations"))
    settings: dict[str, Any] = {"kind": "messages", "messages": field}
    if roles := data.roles_of(one, speakers):
        settings["roles"] = roles
    return settings


def _set_thinking(migration: Migration, key: str, thinks: Any) -> None:
    if thinks is False:
        data.set_template_kwargs(migration, key, {"enable_thinking": False})


def _set_rank(migration: Migration, _: str, rank: Any) -> None:
    twice = 2 * rank if isinstance(rank, int) else None
    alpha = migration.take("lora_alpha", twice)
    migration.job |= {"rank": rank, "lora_alpha": alpha}


def _set_start(migration: Migration, _: str, is_pissa: Any) -> None:
    iterations = migration.take("pissa_iter", 16)
    if is_pissa:
        start = "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
        migration.job["init_lora_weights"] = start
        migration.given.pop("pissa_convert", None)  # it is always converted


def _set_targets(migration: Migration, _: str, targets: Any) -> None:
    if isinstance(targets, str):
        targets = [name.strip() for name in targets.split(",")]
    is_all = targets == ["all"]
    migration.job["target_modules"] = "all-linear" if is_all else targets


_TABLE: Table = {
    "stage": To(_set_stage, "sft"),
    **by_key(
        {
            Refused("and jaxlora trains LoRA adapters with the usual loss"): (
                "export_dir use_galore use_apollo use_badam use_llama_pro use_dft_loss "
                "use_asft_loss use_eaft_loss mixture_of_depths use_kt use_mca"
            )
        }
    ),
    "model_name_or_path": trainer.set_model,
    "output_dir": To(trainer.set_output, "saves/lora"),
    "quantization_bit": _set_quantized,
    "quantization_method": _note_quantization_method,
    "dataset_dir": To(_set_data, "data"),
    "val_size": trainer.set_held_out_share,
    "enable_thinking": _set_thinking,
    "lora_rank": To(_set_rank, 8),
    "lora_dropout": To("dropout", 0.0),
    "pissa_init": _set_start,
    "lora_target": To(_set_targets, "all"),
    "adapter_name_or_path": trainer.set_start,
    "cutoff_len": To("max_length", 2048),
    "learning_rate": To("learning_rate", 5e-5),
    "lr_scheduler_type": To(trainer.set_schedule, "linear"),
    "num_train_epochs": To("epochs", 3.0),
    "per_device_train_batch_size": To(trainer.set_batch, 8),
    "optim": trainer.set_optimizer,
    **dict.fromkeys(
        ("add_special_tokens", "new_special_tokens", "add_tokens"),
        trainer.set_new_tokens,
    ),
    "report_to": trainer.set_trackers,
    **by_key(
        {
            reasons.OWN_TEMPLATE: "template",
            reasons.PREPARED: "overwrite_cache tokenized_path",
            STREAMING: "streaming",
            "losses.png is always written.": "plot_loss",
            reasons.KERNELS: "flash_attn use_unsloth",
            reasons.MEMORY: "use_unsloth_gc",
            "remat is none by default.": "disable_gradient_checkpointing",
            reasons.DEVICES: "ddp_timeout",
            "init_from continues the adapter of the folder.": "create_new_adapter",
            "`jaxlora generate` generates texts with an adapter.": "infer_backend",
            reasons.NO_EMBEDDINGS: "loraplus_lr_embedding",
        }
    ),
}
