"""Why settings of other tools are left out of run files."""

from collections.abc import Mapping

TRUST = "Models are read by jaxlora itself; no code of a checkpoint runs."
CHECKPOINTS = (
    "checkpoint_every counts rounds, and is 50 by default; a checkpoint is also "
    "written at the end and on Ctrl-C."
)
TRACKING = (
    "Set report_to of the run: tensorboard (the default), wandb or trackio; the "
    "environment variables of W&B and Trackio choose the project."
)
KERNELS = "The kernels are chosen by the device; see implementation and attention."
DEVICES = "Set mesh of the run (or --mesh): data, stage, fsdp and tensor, or auto."
EVERY_EVALUATION = (
    "eval_every is a number of optimizer steps. Without it, a job is evaluated at its "
    "start and its end."
)
PREPARED = "Samples are prepared at the start of each run, and tokens are cached."
LOGGING = "log_every counts rounds, and is 1 by default."
OWN_TEMPLATE = (
    "The tokenizer's own chat template is used. Set chat_template in data if it has "
    "none, or for another one."
)
_ROWS = (
    "The embedding has the rows of the checkpoint, and rows of new tokens cannot be "
    "trained yet. trainable_token_indices trains rows that it has, such as those of "
    "reserved tokens."
)
SPECIAL_TOKENS = (
    "Special tokens are those of the checkpoint: set them in its "
    f"tokenizer_config.json. {_ROWS} Samples are packed, so no padding token is needed."
)
OWN_TOKENS = "The texts of tokens come from the checkpoint: change its tokenizer.json."
SYSTEM = "Set system in data."
PUSH = "`jaxlora export RUN OUT --push OWNER/NAME` uploads the adapters."
RESUME = "`jaxlora train --resume` continues a run."
MEMORY = "Set remat of the run, if memory is short."
TEXT_ONLY = "Models are trained on text only."
RATE = "Set lr_schedule and lr_schedule_args of the job; docs/run_file.md has them."
START = "Set init_lora_weights of the job, if its start is one of those."
KD = "Set objective: distill, with records that hold a teacher's log-probabilities."
NF4 = "nf4 is as bitsandbytes stores it, with double quantization."
_SAMPLES = "Set samples of the run for texts that are generated at evaluations."

# Settings of transformers' trainer, which the tools share.
_TRAINER: Mapping[str, str] = {
    "trust_remote_code": TRUST,
    "do_train": "`jaxlora train` trains.",
    "do_eval": "A job with held-out records is evaluated.",
    "do_predict": _SAMPLES,
    "predict_with_generate": _SAMPLES,
    "logging_steps": LOGGING,
    "logging_first_step": LOGGING,
    "logging_strategy": LOGGING,
    "save_steps": CHECKPOINTS,
    "save_strategy": CHECKPOINTS,
    "save_only_model": CHECKPOINTS,
    "save_first_step": CHECKPOINTS,
    "save_safetensors": "Adapters are always saved as safetensors.",
    "overwrite_output_dir": "A folder that holds a run is never overwritten.",
    "resume_from_checkpoint": RESUME,
    "auto_resume_from_checkpoints": RESUME,
    "run_name": TRACKING,
    "eval_strategy": EVERY_EVALUATION,
    "evaluation_strategy": EVERY_EVALUATION,
    "eval_on_start": "A job with held-out records is evaluated before it trains.",
    "metric_for_best_model": "The best evaluation is that of the lowest loss.",
    "greater_is_better": "The best evaluation is that of the lowest loss.",
    "optim_target_modules": "The optimizer trains the weights of the adapter.",
    "dtype": "Set dtype of the run: bfloat16, float32 or auto.",
    "tf32": "Products of float32 are computed as JAX does by default.",
    "torch_compile": KERNELS,
    "use_liger_kernel": KERNELS,
    "enable_liger_kernel": KERNELS,
    "deepspeed": DEVICES,
    "data_seed": "seed also chooses the order of the data.",
    "activation_offloading": MEMORY,
    "low_cpu_mem_usage": "Weights are read piece by piece.",
    "disable_tqdm": "Progress is shown in a terminal only.",
    "default_system": SYSTEM,
    "default_system_message": SYSTEM,
    "special_tokens": SPECIAL_TOKENS,
    "added_tokens_overrides": OWN_TOKENS,
    **dict.fromkeys(
        (
            *("tokens", "add_tokens", "add_special_tokens", "new_special_tokens"),
            *("additional_special_tokens", "new_special_tokens_config", "resize_vocab"),
            *("init_special_tokens", "resize_token_embeddings_to_32x"),
            *("mean_resizing_embeddings", "shrink_embeddings"),
        ),
        _ROWS,
    ),
}
# Families of settings, by how their names begin, with their reasons.
_FAMILIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("wandb_", "use_wandb", "mlflow_", "use_mlflow", "comet_", "use_comet"), TRACKING),
    (("swanlab_", "use_swanlab", "trackio_", "use_trackio", "logging_dir"), TRACKING),
    (("otel_", "use_otel", "use_tensorboard"), TRACKING),
    (("liger_", "torch_compile", "flash_attn_", "fused_attn"), KERNELS),
    (("use_kernels", "cut_cross_entropy", "flex_attn"), KERNELS),
    (("fsdp", "ddp_", "ray_", "use_ray", "accelerat", "dp_", "ulysses_"), DEVICES),
    (("context_parallel", "tensor_parallel", "expert_parallel"), DEVICES),
    (("dataloader_", "dataset_num_proc", "preprocessing_"), PREPARED),
    (("gradient_checkpointing_", "torch_empty_cache"), MEMORY),
    (("hub_", "push_"), PUSH),
    (("image_", "video_", "audio_", "freeze_", "processor_"), TEXT_ONLY),
    (("bnb_", "double_quantization", "use_bnb_nested"), NF4),
    (("cosine_", "lr_quadratic_warmup", "lr_groups"), RATE),
    (("adam_beta3", "adam_epsilon2"), "No optimizer here has this setting."),
    (("pissa_", "loftq_", "eva_", "peft_eva_", "corda_"), START),
    (("kd_", "teacher_"), KD),
)


def find_reason(key: str) -> str | None:
    """Returns why a setting is left out that several tools have; None: not known."""
    if key in _TRAINER:
        return _TRAINER[key]
    return next((why for names, why in _FAMILIES if key.startswith(names)), None)
