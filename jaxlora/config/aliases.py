"""Names of settings in PEFT, TRL, transformers, Axolotl, LLaMA-Factory and Unsloth.

A name is accepted where it means exactly the same as one of ours. For the others, an
error says how to convert them.
"""

from collections.abc import Mapping
from typing import Any


def find_hint(hints: Mapping[str, str], key: str, value: Any) -> str | None:
    """Returns what to write instead of another tool's setting, for its value.

    Args:
        hints: What to write instead of each setting, as a sentence.
        key: The setting.
        value: Its value.
    """
    if (hint := hints.get(key)) is None:
        return None
    if _is_off(value) and not hint.startswith(_LEAVE_OUT):
        hint = f"{_LEAVE_OUT}."
    if _is_off(value) and value not in (None, "", [], {}):
        hint = HINTS_IF_OFF.get(key, hint)
    return hint


def _is_off(value: Any) -> bool:
    """Whether a value turns a setting off, in the words of YAML or of other tools."""
    if isinstance(value, str):
        return value.lower() in ("", "no", "none", "false", "off", "disabled")
    return value in (None, 0, [], {})


_LEAVE_OUT = "Leave it out"
_BATCH = (
    "batch_size is the number of samples of one optimizer step: the samples per device "
    "times gradient_accumulation_steps times the number of devices, such as "
    "2 x 4 x 1 = 8. They are divided into microbatches automatically."
)
_PACKING = "Leave it out: samples are always packed, and each attends to itself only."
_REMAT = "Set remat of the run: none, elementwise, mlp, layer or auto."
_DTYPE = "Set dtype of the run: bfloat16, float32 or auto (bfloat16 on a GPU)."
_FOUR_BITS = "Set `quantize_base: nf4` for the run."
_EIGHT_BITS = "Set `quantize_base: int8` (or fp8, on Hopper) for the run."
_OPTIMIZER = "Set optimizer: adamw, schedule_free_adamw, lion, sgd, muon or adafactor."
_FROZEN = "Leave it out: norms and biases stay frozen."
NO_LOFTQ = (
    "Set init_lora_weights to pissa or olora on a base that is not quantized, or "
    "leave it out on one that is."
)
_LOSS_ON = (
    "Set loss_on in data: completion trains on the answers only, last on the last one "
    "of a chat, all on every token."
)
_CHECKPOINTS = (
    "Set checkpoint_every of the run, in rounds (one optimizer step of every job), or "
    "checkpoint_seconds."
)
_DATASETS = (
    "Give each job its data, with a file, folder or hub id as path, or with several "
    "of them in datasets."
)
_TRACKING = (
    "Set report_to of the run; environment variables of the tracker choose the project."
)
_PUSH = "Leave it out: `jaxlora export RUN OUT --push OWNER/NAME` uploads the adapters."
_MESH = "Set mesh of the run: data, stage, fsdp, expert and tensor, or auto."
_CACHED = "Leave it out: records are tokenized in parallel, and tokens are cached."
_TEMPLATE = (
    "Set chat_template in data: a file, a model's folder, chatml, llama3 or a text; or "
    "leave it out for the tokenizer's own. For prompt and completion, set `chat: true`."
)

_OF_MODELS = {
    "load_in_4bit": _FOUR_BITS,
    "load_in_8bit": _EIGHT_BITS,
    "quantization_bit": "Set quantize_base of the run: nf4 for 4 bits, int8 for 8.",
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "torch_dtype": _DTYPE,
    "gradient_checkpointing": _REMAT,
    "use_gradient_checkpointing": _REMAT,
    "gradient_checkpointing_kwargs": _REMAT,
    "attn_implementation": "Set attention of the run: cudnn, triton, xla or auto.",
    "flash_attention": "Set attention of the run: cudnn, triton, xla or auto.",
    "flash_attn": "Set attention of the run: cudnn, triton, xla or auto.",
    "save_steps": _CHECKPOINTS,
    "save_strategy": _CHECKPOINTS,
    "saves_per_epoch": _CHECKPOINTS,
    "logging_steps": "Set log_every of the run, in rounds: a step of every job.",
    "push_to_hub": _PUSH,
    "hub_model_id": _PUSH,
    "run_name": _TRACKING,
    "wandb_project": _TRACKING,
    "deepspeed": _MESH,
    "fsdp": _MESH,
    "fsdp_config": _MESH,
    "dataset_num_proc": _CACHED,
    "datasets": _DATASETS,
    "dataset": _DATASETS,
    "dataset_name": _DATASETS,
    "template": _TEMPLATE,
    "chat_template": _TEMPLATE,
}

_NO_BFLOAT16 = "Leave it out; for float32, set `dtype: float32` of the run."
_NOT_FUSED = "Leave it out, or set `attention: xla` of the run."
_NO_CHECKPOINTS = (
    "Set `checkpoint_every: null` of the run, for a checkpoint at the end only."
)
_ON_ALL = "Set `loss_on: all` in data, to train on every token."

# Hints at what to write instead of a setting that is off: false, null, 0, no or none.
# Without one, it can be left out.
HINTS_IF_OFF: Mapping[str, str] = {
    "bf16": _NO_BFLOAT16,
    "fp16": _NO_BFLOAT16,
    "flash_attention": _NOT_FUSED,
    "flash_attn": _NOT_FUSED,
    "save_steps": _NO_CHECKPOINTS,
    "save_strategy": _NO_CHECKPOINTS,
    "saves_per_epoch": _NO_CHECKPOINTS,
    "lora_target_linear": "Leave it out, and set target_modules to a list of suffixes: "
    "otherwise all linears are adapted.",
    "completion_only_loss": _ON_ALL,
    "assistant_only_loss": _ON_ALL,
}

# Our name of each setting that means the same, by that of another tool; and for other
# settings, what to write instead. A run has the hints of jobs.
JOB_NAMES: Mapping[str, str] = {
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "additional_target": "modules_to_save",
    "peft_init_lora_weights": "init_lora_weights",
    "peft_layers_pattern": "layers_pattern",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "loraplus_lr_ratio": "lora_plus_ratio",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "lr_scheduler_type": "lr_schedule",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler_kwargs": "lr_schedule_args",
    "adam_beta1": "adam_b1",
    "adam_beta2": "adam_b2",
    "adam_epsilon": "adam_eps",
    "max_seq_length": "max_length",
    "eval_steps": "eval_every",
    "early_stopping_patience": "early_stopping",
    "early_stopping_threshold": "early_stopping_delta",
    "load_best_model_at_end": "keep_best",
}
JOB_HINTS: Mapping[str, str] = {
    "lr": "Set learning_rate.",
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "per_device_eval_batch_size": "Leave it out: evaluation fills microbatches.",
    "eval_batch_size": "Leave it out: evaluation fills microbatches.",
    "sequence_len": "Set max_length. Axolotl drops longer samples: to do the same, "
    "set `too_long: drop` as well.",
    "cutoff_len": "Set max_length; a longer sample is cut at its end.",
    "val_set_size": "Set eval_fraction, the share of the records that is held out.",
    "test_size": "Set eval_fraction, the share of the records that is held out.",
    "test_split_size": "Set eval_fraction, the share of the records held out.",
    "eval_strategy": "Set eval_every, in optimizer steps.",
    "evals_per_epoch": "Set eval_every, in optimizer steps.",
    "lora_target": "Set target_modules: a list of suffixes, or all-linear.",
    "lora_target_linear": "Set `target_modules: all-linear`.",
    "ensure_weight_tying": "Leave it out: modules_to_save copies embedding and "
    "head each by itself, and trainable_token_indices train both ends if they are "
    "tied.",
    "embedding_learning_rate": "Leave it out: all that an adapter trains has the "
    "job's learning_rate.",
    "bias": _FROZEN,
    "train_bias": _FROZEN,
    "loftq_config": NO_LOFTQ,
    "peft_loftq_config": NO_LOFTQ,
    "lora_bias": _FROZEN,
    "lora_model_dir": "Set init_from: the PEFT folder to start from.",
    "adapter_name_or_path": "Set init_from: the PEFT folder to start from.",
    "task_type": "Leave it out: the objective decides it.",
    "packing": _PACKING,
    "sample_packing": _PACKING,
    "neat_packing": _PACKING,
    "pad_to_sequence_len": _PACKING,
    "group_by_length": _PACKING,
    "optim": _OPTIMIZER,
    "random_state": "Set seed.",
    "train_on_inputs": _LOSS_ON,
    "train_on_prompt": _LOSS_ON,
    "completion_only_loss": _LOSS_ON,
    "assistant_only_loss": _LOSS_ON,
    "dataset_text_field": "Set text in data.",
    "max_samples": "Set limit in data.",
    "neftune_noise_alpha": "Leave it out: no noise is added to embeddings.",
    **_OF_MODELS,
}

RUN_NAMES: Mapping[str, str] = {
    "base_model": "model",
    "model_name_or_path": "model",
    "model_name": "model",
    "base_model_name_or_path": "model",
    "model_revision": "revision",
    "revision_of_model": "revision",
    "save_total_limit": "keep_checkpoints",
}

# What `streaming` is for in other tools.
STREAMING = (
    "Records are read once, before training, and their tokens lie in a mapped file, so "
    "that data may be larger than memory. If a dataset on the hub is too large for the "
    "disk, set limit: the records after it are not downloaded. Leave streaming out."
)

DATA_NAMES: Mapping[str, str] = {"dataset_text_field": "text", "max_samples": "limit"}
DATA_HINTS: Mapping[str, str] = {
    "mix_strategy": "Set mix: concat or interleave; interleave_under and "
    "interleave_over are the stopping_strategy first_exhausted and all_exhausted.",
    "interleave_probs": "Set probabilities: a list with one for each data set.",
    "streaming": STREAMING,
    "buffer_size": "All samples of a data set are shuffled. Leave it out.",
    "shuffle_buffer": "All samples of a data set are shuffled. Leave it out.",
    "skip": "Set eval_fraction to hold out records; or split for a part of a "
    "dataset on the hub, such as train[1000:].",
    "weights": "Set `mix: interleave` and probabilities beside datasets.",
    "type": "Set kind if the fields of the records do not tell what they are.",
    "name": "Set subset for the configuration of a dataset on the hub.",
    "field_messages": "Set messages to the name of the field.",
    "train_on_inputs": _LOSS_ON,
    "train_on": _LOSS_ON,
    "mask_history": "Set `loss_on: last` to train on the last answer only.",
}
