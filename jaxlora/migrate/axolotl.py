"""Axolotl's YAML."""

from collections.abc import Mapping
from typing import Any

from jaxlora.data.templates.known import KNOWN
from jaxlora.errors import ConfigError
from jaxlora.migrate import data, preferences, reasons, trainer
from jaxlora.migrate.migration import Migration, Refused, Table, To, set_parameters
from jaxlora.migrate.reasons import by_key

_TYPES: Mapping[str, dict[str, Any]] = {
    "alpaca": {"kind": "alpaca"},
    "completion": {"kind": "text"},
    "pretrain": {"kind": "text"},
    "chat_template": {"kind": "messages"},
    "sharegpt": {"kind": "messages", "messages": "conversations"},
    "alpaca_w_system.load_open_orca": {
        "kind": "prompt_completion",
        "prompt": "{% if system_prompt %}### System:\n{{ system_prompt }}\n{% endif %}"
        "### Human:\n{{ question }}\n### Assistant:\n",
        "completion": "response",
    },
    "alpaca_w_system.load_open_orca_chatml": {
        "kind": "prompt_completion",
        "prompt": "{% if system_prompt %}<|im_start|>system\n{{ system_prompt }}"
        "<|im_end|>\n{% endif %}<|im_start|>user\n{{ question }}<|im_end|>\n"
        "<|im_start|>assistant\n",
        "completion": "response",
    },
}
# The field that some types of preferences read if a record has it.
_SYSTEM = "{{ system | default('', true) }}"
# Values in the description of a data set that are Axolotl's defaults, or mean nothing
# else here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": (
        ["assistant"],
        ["gpt"],
        ["assistant", "gpt"],
        ["gpt", "assistant"],
    ),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "field_tools": ("tools",),
}
_DATASET_REASONS = by_key(
    {
        "Set system in data to the name of the field.": "field_system",
        "Name the thoughts in the records as the chat template does.": (
            "field_thinking template_thinking_key"
        ),
        reasons.OWN_TEMPLATE: "conversation",
        "loss_on: completion trains on what the assistant says, last on its last "
        "answer, and all on every token. A message with `weight: 0` is not trained "
        "on.": "roles_to_train message_field_training message_field_training_detail",
        "The token that ends a message that is trained on is trained on.": (
            "train_on_eos train_on_eot"
        ),
        reasons.TRUST: "trust_remote_code",
        reasons.PREPARED: "preprocess_shards",
        "Set limit to use the first records only.": "shards shards_idx",
    }
)


def migrate(given: dict[str, Any]) -> Migration:
    """Converts Axolotl's settings.

    Raises:
        ConfigError: They are of training that jaxlora does not do.
    """
    migration = Migration(tool="Axolotl", given=given)
    migration.convert(_TABLE)
    return trainer.finish(migration, _TABLE)


def _check_adapter(migration: Migration, _: str, adapter: Any) -> None:
    if adapter not in ("lora", "qlora"):
        raise ConfigError(
            f"adapter is {adapter!r}, and jaxlora trains LoRA adapters. Only files "
            "with adapter: lora or adapter: qlora can be converted."
        )


def _set_data(migration: Migration, _: str, datasets: Any) -> None:
    job, held_out = migration.job, migration.take("test_datasets")
    datasets = datasets or _pretraining(migration)
    template = _take_template(migration, None)
    migration.trains_on_prompts = migration.take("train_on_inputs") is True
    job["data"] = {"path": "records.jsonl"}
    if datasets:
        job["data"] = _take_data(migration, "datasets", datasets, template)
    else:
        migration.to_do.append("data.path: there were no datasets. Give a file.")
    if held_out:
        job["eval_data"] = _take_data(migration, "test_datasets", held_out, template)
    sets = data.all_sets(migration)
    if template is not None and not any("chat_template" in one for one in sets):
        migration.left_out["chat_template"] = "No data set has messages."


def _pretraining(migration: Migration) -> Any:
    """Returns the data sets of plain text, described like the others."""
    given = migration.take("pretraining_dataset")
    if isinstance(given, str):
        given = {"path": given}
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        return given
    return [
        {"type": "completion", "field": one.get("text_column")}
        | {k: v for k, v in one.items() if k not in ("text_column", "type")}
        for one in given
    ]


def _take_data(
    migration: Migration, key: str, given: Any, template: str | None
) -> dict[str, Any]:
    """Converts the data sets that a setting lists, with a template of their chats."""
    sets, split = [], "test" if key == "test_datasets" else "train"
    take_fields = _take_preferences if migration.objective else _take_answers
    for number, dataset in enumerate(data.list_datasets(given, key)):
        one = migration.part(f"{key}.{number}", dataset)
        kind, found = one.take("type"), data.take_sources(one, split)
        one.take("ds_type")  # The suffix of the file says it.
        take_fields(one, kind, template)
        for setting, values in _NEUTRAL.items():
            if one.given.get(setting) in values:
                del one.given[setting]
        one.leave_rest(
            "Change the records. `jaxlora data show` prints how they are read.",
            _DATASET_REASONS,
        )
        sets += [source | one.job for source in found]
    return data.join(sets)


def _take_answers(one: Migration, kind: Any, template: str | None) -> None:
    """Takes the fields of records, each of a type, and the template of chats."""
    if isinstance(kind, dict):
        one.job |= _own_type(one.part("type", kind))
    else:
        one.job |= _named_type(one, str(kind or "completion"))
    one.convert({"field_messages": To("messages"), "field": To("text")})
    if one.trains_on_prompts:
        one.job["loss_on"] = "all"
    is_chat = one.job.get("kind") == "messages"
    if (roles := _take_roles(one)) and is_chat:
        one.job["roles"] = roles
    template = _take_template(one, template)
    if template is not None and is_chat:
        one.job["chat_template"] = template


def _take_template(migration: Migration, otherwise: str | None) -> str | None:
    """Returns our setting `chat_template`; None: the tokenizer's own.

    The text, or a file of it, counts if the name is `jinja`, or none.
    """
    name, text = map(migration.take, ("chat_template", "chat_template_jinja"))
    if name in (None, "jinja") and text:
        return str(text)
    if name is None:
        return otherwise
    if str(name) in KNOWN:
        return str(name)
    if name != "tokenizer_default":
        reason = f"{name!r} is not used. {reasons.OWN_TEMPLATE}"
        migration.leave_out("chat_template", reason)
    return None


def _take_preferences(one: Migration, kind: Any, template: str | None) -> None:
    """Takes the fields of pairs, or of answers with labels."""
    own = one.part("type", kind if isinstance(kind, dict) else {})
    if template is not None:
        one.job["chat_template"] = template
    for ours in ("prompt", "chosen", "rejected", "completion", "label"):
        key = f"field_{ours}"
        field = own.take(key)
        if ours in ("prompt", "chosen", "rejected"):
            field = field or one.take("field_messages" if ours == "prompt" else key)
        if field:
            one.job[ours] = str(field)
    if isinstance(kind, str) and kind.partition(".")[0] in ("chatml", "llama3"):
        one.job |= {"chat": True, "system": _SYSTEM}
    one.to_do.append(
        f"data: type {kind!r} is read by its fields, with the tokenizer's own chat "
        "template. Check it with `jaxlora data show`, and name the fields in prompt, "
        "chosen and rejected, or prompt, completion and label, where they differ."
    )
    own.leave_rest("Write it into prompt, chosen or rejected, which may be templates.")


def _named_type(migration: Migration, kind: str) -> dict[str, Any]:
    base, _, style = kind.partition(":")
    name = base.removesuffix(".default")
    if name not in _TYPES:
        migration.to_do.append(
            f"data: type {kind!r} has no counterpart. Name the fields: prompt and "
            "completion (which may be templates), messages or text."
        )
        return {}
    if style:
        migration.to_do.append(
            f"data: type {kind!r} is read as {name!r}. If its prompts differ, set "
            "prompt and completion, which may be templates, instead of kind."
        )
    if _TYPES[name]["kind"] == "text":
        migration.to_do.append(
            "data: Axolotl divides a text that is longer than sequence_len into "
            "several samples; jaxlora does with it as too_long says. Divide long texts "
            "in the file."
        )
    return dict(_TYPES[name])


def _own_type(own: Migration) -> dict[str, Any]:
    """Converts a type that the user described by fields and formats."""
    names = {n: str(own.take(f"field_{n}", n)) for n in ("instruction", "input")}
    settings = {"kind": "prompt_completion"}
    settings["completion"] = str(own.take("field_output", "output"))
    given = str(own.take("format", "{instruction} {input} "))
    plain = str(own.take("no_input_format", "{instruction} "))
    prompt = data.template_of(given, names)
    without = data.template_of(plain, names | {"input": ""})
    system = _system_of_own_type(own)
    own.leave_rest("Write it into prompt, which is a template over the fields.")
    if prompt is None or without is None or system is None:
        own.to_do.append(
            f"data.prompt: the formats {given!r} and {plain!r} cannot be converted. "
            "Give a template, such as '{{ instruction }}'."
        )
        return settings
    if "{input}" in given:
        prompt = data.with_input(prompt, without, names["input"])
    return settings | {"prompt": system + prompt}


def _system_of_own_type(own: Migration) -> str | None:
    """Takes the text before all prompts; None if it cannot be part of a template."""
    given = str(own.take("system_format", "{system}"))
    text, field = own.take("system_prompt", ""), str(own.take("field_system", ""))
    if not field:
        text = given.replace("{system}", str(text)) if text else ""
        return None if data.is_template(text) else text
    if text:
        own.leave_out("system_prompt", "The system prompt of each record is used.")
    whole = data.template_of(given, {"system": field})
    return None if whole is None else data.with_input(whole, "", field)


def _take_roles(one: Migration) -> dict[str, str]:
    """Returns the roles of speakers; says which names of fields are not known here."""
    given = one.take("message_property_mappings")
    fields = dict(given) if isinstance(given, dict) else {}
    for ours in ("role", "content"):
        older = one.take(f"message_field_{ours}", ours)
        fields[ours] = fields.get(ours) or older
    data.note_fields(one, fields)
    roles = one.take("roles")
    speakers = {
        str(role): names if isinstance(names, list) else [names]
        for role, names in (roles if isinstance(roles, dict) else {}).items()
    }
    return data.roles_of(one, speakers)


def _set_targets(migration: Migration, key: str, targets: Any) -> None:
    if migration.take("lora_target_linear"):
        if targets:
            migration.left_out[key] = "lora_target_linear adapts all linears."
        targets = "all-linear"
    if not targets:
        targets = "all-linear"
        migration.to_do.append("target_modules: none were given, so it is all-linear.")
    migration.job["target_modules"] = targets


def _too_long(strategy: Any) -> str:
    name = str(strategy).lower()
    return "error" if name == "raise" else name


def _set_schedule(migration: Migration, key: str, schedule: Any) -> None:
    trainer.set_schedule(migration, key, schedule)
    if migration.job.get("lr_schedule") != "constant" and not (
        migration.given.keys() & {"warmup_steps", "warmup_ratio"}
    ):
        migration.job["warmup_ratio"] = 0.03
        migration.to_do.append(
            "warmup_ratio: Axolotl warms up for 3% of the steps by default, but for "
            "100 at most. Set warmup_steps: 100 for a run of over 3,333 steps."
        )


def _set_batch(migration: Migration, key: str, samples: Any) -> None:
    given = migration.given
    if "batch_size" in given and not given.get("gradient_accumulation_steps"):
        # An older setting: the samples of an optimizer step on one device.
        key, samples = "batch_size", migration.take("batch_size", 1)
    trainer.set_batch(migration, key, samples)


def _set_special_tokens(migration: Migration, key: str, tokens: Any) -> None:
    if not isinstance(tokens, dict):
        if tokens:
            migration.left_out[key] = reasons.SPECIAL_TOKENS
        return
    special = migration.part(key, tokens)
    new = "additional_special_tokens"
    trainer.set_new_tokens(migration, f"{key}.{new}", special.take(new))
    if end := special.given.get("eos_token"):
        migration.to_do.append(
            f"{key}: the eos_token was {end!r}. If that of the checkpoint is another "
            "one, set it in tokenizer_config.json."
        )
    if any(special.given.values()):
        migration.left_out[key] = reasons.SPECIAL_TOKENS


_TABLE: Table = {
    "adapter": _check_adapter,
    **by_key(
        {
            Refused("and jaxlora trains LoRA adapters on given answers only"): (
                "process_reward_model kd_trainer diffusion relora num_labels "
                "trainer_cls"
            )
        }
    ),
    "rl": preferences.set_axolotl,
    "base_model": trainer.set_model,
    "output_dir": To(trainer.set_output, "./model-out"),
    "load_in_4bit": trainer.set_quantized,
    "datasets": _set_data,
    "chat_template_kwargs": data.set_template_kwargs,
    "val_set_size": trainer.set_held_out_share,
    "curriculum_sampling": To("shuffle", values=lambda is_on: False if is_on else None),
    "lora_r": To("rank", 8),
    "lora_alpha": To("lora_alpha", 16),
    "lora_dropout": To("dropout", 0.0),
    "lora_target_modules": _set_targets,
    "lora_target_parameters": set_parameters,
    "lora_rank_pattern": To("rank_pattern"),
    "lora_alpha_pattern": To("alpha_pattern"),
    "lora_model_dir": trainer.set_start,
    "sequence_len": To("max_length", 512),
    "excess_length_strategy": To("too_long", "drop", _too_long),
    "lr_scheduler": To(_set_schedule, "cosine"),
    "micro_batch_size": To(_set_batch, 1),
    "optimizer": trainer.set_optimizer,
    "special_tokens": _set_special_tokens,
    "tokens": trainer.set_new_tokens,
    "num_epochs": To("epochs", 1.0),
    "gptq": trainer.not_quantized("GPTQ"),
    **by_key(
        {
            "The family is read from config.json.": "model_type model_config_type",
            "The model is that of the checkpoint's config.json.": (
                "model_config overrides_of_model_config"
            ),
            "config.json is read from the folder of the model.": "base_model_config",
            "The tokenizer is read from the folder of the model.": "tokenizer_config",
            "The tokenizer is read from tokenizer.json.": (
                "tokenizer_type tokenizer_use_fast tokenizer_legacy "
                "tokenizer_use_mistral_common"
            ),
            "Set the environment variable HF_TOKEN.": "hf_use_auth_token",
            "Unknown keys are always errors.": "strict",
            reasons.PREPARED: "dataset_prepared_path dataset_processes",
            reasons.TEXT_ONLY: "skip_prepare_dataset",
            "Data sets are joined, and shuffle is on.": "shuffle_merged_datasets",
            "Samples are always packed, in evaluations too.": "eval_sample_packing",
            reasons.EVERY_EVALUATION: "evals_per_epoch",
            reasons.CHECKPOINTS: "saves_per_epoch",
            "Which tokens end a message is found out from the chat template.": (
                "eot_tokens"
            ),
            reasons.KERNELS: (
                "flash_attention xformers_attention sdp_attention flex_attention "
                "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
            ),
            "Plugins of Axolotl do not run here; the kernels are chosen by the "
            "device.": "plugins",
            "Set samples of the run for texts generated at evaluations.": (
                "eval_table_size"
            ),
            "Set max_new_tokens in samples of the run.": "eval_max_new_tokens",
            "Evaluations measure the loss.": "eval_causal_lm_metrics do_causal_lm_eval",
            "A job whose loss is not finite fails by itself.": (
                "loss_watchdog_threshold loss_watchdog_patience"
            ),
            reasons.TRANSPOSED: "lora_fan_in_fan_out",
            "Experts are not quantized here; keep_bf16 of the run leaves them out.": (
                "quantize_moe_experts"
            ),
            reasons.NO_EMBEDDINGS: "loraplus_lr_embedding",
            "All that an adapter trains has the job's learning_rate.": (
                "embedding_lr embedding_lr_scale"
            ),
            "The weights of the base stay frozen.": "unfrozen_parameters",
            "Each optimizer step is packed by itself.": "sample_packing_sequentially",
            "It follows from gradient_accumulation_steps.": "batch_size",
            "The base is frozen, so quantization has nothing to train there.": "qat",
            "`jaxlora data show` prints samples.": "debug",
        }
    ),
}
