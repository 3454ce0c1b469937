"""Why settings of other tools are left out of run files."""

from collections.abc import Mapping
from typing import Any

TRUST = "Models are read by jaxlora itself; no code of a checkpoint runs."
CHECKPOINTS = (
    "A checkpoint is written every two minutes (checkpoint_every, "
    "checkpoint_seconds), at the end, and on Ctrl-C."
)
TRACKING = (
    "Set report_to of the run: tensorboard (the default), wandb or trackio; the "
    "environment variables of W&B and Trackio choose the project."
)
KERNELS = "The kernels are chosen by the device; see implementation and attention."
DEVICES = (
    "Set mesh of the run (or --mesh): data, stage, fsdp, expert and tensor, or auto."
)
EVERY_EVALUATION = (
    "eval_every is a number of optimizer steps. Without it, a job is evaluated at its "
    "start and its end."
)
PREPARED = "Samples are prepared at the start of each run, and tokens are cached."
OWN_TEMPLATE = (
    "The tokenizer's own chat template is used. Set chat_template in data if it has "
    "none, or for another one."
)
MEMORY = "Set remat of the run, if memory is short."
TEXT_ONLY = "Models are trained on text only."
NF4 = "nf4 is as bitsandbytes stores it, with double quantization."
NO_EMBEDDINGS = "Embeddings have no LoRA here."
TRANSPOSED = "Linears are never transposed here."
SPECIAL_TOKENS = (
    "Special tokens are those of the checkpoint: set them in its "
    "tokenizer_config.json, after `jaxlora convert MODEL OUT --new-tokens` if its "
    "tokenizer lacks one. new_special_tokens trains its row. Samples are packed, so no "
    "padding token is needed."
)
_ROWS = (
    "`jaxlora convert MODEL OUT --new-tokens` adds tokens, and rows for them where "
    "embedding and head have too few. The rows start as the mean of the others, and "
    "new_special_tokens trains them."
)


def by_key(entries: Mapping[Any, str]) -> dict[str, Any]:
    """Returns the entry of each key, from the keys of each, with spaces between them.

    An entry is the reason why the setting is left out, or whatever `Table` has.
    """
    return {key: entry for entry, keys in entries.items() for key in keys.split()}


# Settings of transformers' trainer and of PEFT, which the tools share. A `*` stands for
# how a name may go on.
_SHARED: Mapping[str, str] = by_key(
    {
        TRUST: "trust_remote_code",
        "`jaxlora train` trains.": "do_train",
        "A job with held-out records is evaluated.": "do_eval",
        "Set samples of the run for texts that are generated at evaluations.": (
            "do_predict predict_with_generate"
        ),
        "log_every counts rounds, and is 1 by default.": (
            "logging_steps logging_first_step logging_strategy"
        ),
        CHECKPOINTS: "save_steps save_strategy save_only_model save_first_step",
        "Adapters are always saved as safetensors.": "save_safetensors",
        "A folder that holds a run is never overwritten.": "overwrite_output_dir",
        "`jaxlora train --resume` continues a run.": (
            "resume_from_checkpoint auto_resume_from_checkpoints"
        ),
        TRACKING: (
            "run_name wandb_* use_wandb* mlflow_* use_mlflow* comet_* use_comet* "
            "swanlab_* use_swanlab* trackio_* use_trackio* logging_dir* otel_* "
            "use_otel* use_tensorboard*"
        ),
        EVERY_EVALUATION: "eval_strategy evaluation_strategy",
        "A job with held-out records is evaluated before it trains.": "eval_on_start",
        "The best evaluation is that of the lowest loss.": (
            "metric_for_best_model greater_is_better"
        ),
        "The optimizer trains the weights of the adapter.": "optim_target_modules",
        "Set dtype of the run: bfloat16, float32 or auto.": "dtype",
        "Products of float32 are computed as JAX does by default.": "tf32",
        KERNELS: (
            "torch_compile* use_liger_kernel enable_liger_kernel liger_* flash_attn_* "
            "fused_attn* use_kernels* cut_cross_entropy* flex_attn*"
        ),
        DEVICES: (
            "deepspeed fsdp* ddp_* ray_* use_ray* accelerat* dp_* ulysses_* "
            "context_parallel* tensor_parallel* expert_parallel*"
        ),
        "seed also chooses the order of the data.": "data_seed",
        MEMORY: "activation_offloading gradient_checkpointing_* torch_empty_cache*",
        "Weights are read piece by piece.": "low_cpu_mem_usage",
        "Progress is shown in a terminal only.": "disable_tqdm",
        "Set system in data.": "default_system default_system_message",
        "The texts of tokens come from the checkpoint: change its tokenizer.json.": (
            "added_tokens_overrides"
        ),
        _ROWS: (
            "additional_special_tokens new_special_tokens_config resize_vocab "
            "init_special_tokens resize_token_embeddings_to_32x "
            "mean_resizing_embeddings shrink_embeddings"
        ),
        PREPARED: "dataloader_* dataset_num_proc* preprocessing_*",
        "`jaxlora export RUN OUT --push OWNER/NAME` uploads the adapters.": (
            "hub_* push_*"
        ),
        TEXT_ONLY: "image_* video_* audio_* freeze_* processor_*",
        NF4: "bnb_* double_quantization* use_bnb_nested*",
        "Set lr_schedule and lr_schedule_args of the job; docs/run_file.md has "
        "them.": "cosine_* lr_quadratic_warmup* lr_groups*",
        "No optimizer here has this setting.": "adam_beta3* adam_epsilon2*",
        "Set init_lora_weights of the job, if its start is one of those.": (
            "pissa_* loftq_* eva_* peft_eva_* corda_*"
        ),
        "Set objective: distill, with records that hold a teacher's "
        "log-probabilities.": "kd_* teacher_*",
    }
)


def find_reason(key: str) -> str | None:
    """Returns why a setting is left out that several tools have; None: not known."""
    if key in _SHARED:
        return _SHARED[key]
    families = (name for name in _SHARED if name.endswith("*"))
    return next((_SHARED[n] for n in families if key.startswith(n[:-1])), None)
