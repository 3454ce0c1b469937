"""Settings of other tools become run files, and nothing is left out in silence."""

import contextlib
import itertools
import json
import re

import pytest

from jaxlora.cli.main import main
from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.run_file import load_run
from jaxlora.errors import ConfigError
from jaxlora.migrate import migrate_file
from tests.jaxlora.migrate.texts import AXOLOTL, MODEL, ON_DATA

AXOLOTL_ALPACA = """
base_model: someone/Llama-8B
model_type: LlamaForCausalLM
load_in_8bit: true
load_in_4bit: false
datasets:
  - path: someone/alpaca_small
    type: alpaca
    split: train[:90%]
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
early_stopping_patience:
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.01
special_tokens: {pad_token: <pad>}
"""

AXOLOTL_CHAT = """
base_model: folder/of/a/model
load_in_4bit: true
chat_template: llama3
datasets:
  - path: ./chats.jsonl
    type: chat_template
    field_messages: dialog
    roles_to_train: [assistant]
test_datasets:
  - path: ./held_out.jsonl
    type: sharegpt
adapter: qlora
sequence_len: 2048
excess_length_strategy: truncate
lora_r: 8
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
micro_batch_size: 4
max_steps: 100
eval_steps: 20
early_stopping_patience: 3
lr_scheduler: constant
warmup_steps: 10
learning_rate: 1e-4
adam_beta2: 0.95
loraplus_lr_ratio: 16
train_on_inputs: true
neftune_noise_alpha: 5
"""

LLAMA_FACTORY = """
model_name_or_path: someone/Llama-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
quantization_bit: 4
dataset: identity
template: llama3
cutoff_len: 2048
max_samples: 1000
output_dir: saves/llama3/lora/sft
logging_steps: 10
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 200
"""

PEFT = json.dumps(
    {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "someone/Llama-8B",
        "revision": None,
        "r": 16,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": ["v_proj", "q_proj"],
        "rank_pattern": {"layers.0.*": 4},
        "bias": "none",
        "use_rslora": True,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": ["lm_head"],
    }
)
TRL = """
model_name_or_path: someone/Qwen-0.6B
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
dataset_name: someone/chats
dataset_train_split: train_sft
dataset_test_split: test_sft
eval_strategy: steps
eval_steps: 50
load_best_model_at_end: true
max_length: 2048
packing: true
assistant_only_loss: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
num_train_epochs: 2
learning_rate: 2.0e-4
lr_scheduler_type: cosine
warmup_steps: 0.1
optim: adafactor
report_to: [wandb, mlflow]
push_to_hub: true
run_name: first
gradient_checkpointing_kwargs: {use_reentrant: false}
seed: 7
"""
FILES = {
    "axolotl_alpaca": AXOLOTL_ALPACA,
    "axolotl_chat": AXOLOTL_CHAT,
    "llama_factory": LLAMA_FACTORY,
    "peft": PEFT,
    "trl": TRL,
}


def settings(job: LoraJob, *names: str) -> tuple:
    return tuple(getattr(job, name) for name in names)


def test_axolotl_on_instructions(migrated):
    migration, run = migrated(AXOLOTL_ALPACA)
    [job] = run.jobs
    assert (run.model, run.quantize_base) == ("someone/Llama-8B", "int8")
    assert settings(job, "rank", "lora_alpha", "dropout") == (32, 16.0, 0.05)
    assert settings(job, "batch_size", "epochs", "learning_rate") == (8, 4.0, 2e-4)
    assert settings(job, "max_length", "too_long") == (4096, "drop")
    assert settings(job, "weight_decay", "warmup_ratio", "seed") == (0.01, 0.1, 42)
    assert settings(job, "eval_fraction", "target_modules") == (0.05, "all-linear")
    assert job.name == "lora-out" and job.data.split == "train[:90%]"
    assert job.data.kind == "alpaca"
    assert any("8 sequences of 4096 tokens" in text for text in migration.to_do)
    assert any("jaxlora[datasets]" in text for text in migration.to_do)
    assert "warmup" not in str(migration.to_do)
    wanted = {"evals_per_epoch", "special_tokens", "optimizer"}
    assert wanted <= migration.left_out.keys()
    assert job.modules_to_save == ("embed_tokens", "lm_head")
    assert job.optimizer == "adamw"
    assert "its state is float32" in migration.left_out["optimizer"]


def test_axolotl_on_chats(migrated):
    migration, run = migrated(AXOLOTL_CHAT)
    [job] = run.jobs
    assert run.quantize_base == "nf4" and job.max_length == 2048
    assert job.too_long == "truncate" and job.target_modules == ("q_proj", "v_proj")
    assert (job.data.kind, job.data.messages) == ("messages", "dialog")
    assert (job.data.loss_on, job.data.chat_template) == ("all", "llama3")
    assert job.eval_data is not None and job.eval_data.messages == "conversations"
    assert settings(job, "steps", "eval_every", "early_stopping") == (100, 20, 3)
    assert settings(job, "lora_plus_ratio", "adam_b2", "batch_size") == (16.0, 0.95, 4)
    # `constant` has no warm-up in transformers.
    assert settings(job, "lr_schedule", "warmup_steps") == ("constant", None)
    left = migration.left_out
    assert {"warmup_steps", "neftune_noise_alpha"} <= left.keys()
    assert "datasets.0.roles_to_train" not in left
    assert left["neftune_noise_alpha"] == "No noise is added to embeddings."


def test_llama_factory(migrated):
    migration, run = migrated(LLAMA_FACTORY)
    [job] = run.jobs
    assert (run.model, run.quantize_base) == ("someone/Llama-8B-Instruct", "nf4")
    # LLaMA-Factory's own default of lora_alpha is twice the rank.
    assert settings(job, "rank", "lora_alpha", "batch_size") == (8, 16.0, 8)
    assert settings(job, "max_length", "epochs", "lr_schedule") == (2048, 3.0, "cosine")
    assert (job.name, job.data.path) == ("sft", "data/identity.json")
    assert job.data.limit == 1000 and job.target_modules == "all-linear"
    assert any("dataset_info.json" in text for text in migration.to_do)
    assert {"template", "val_size"} <= migration.left_out.keys()


def test_tokens_of_peft(migrated):
    given = json.loads(PEFT) | {
        "bias": "lora_only",
        "trainable_token_indices": {"embed_tokens": [7, 5]},
    }
    migration, run = migrated(json.dumps(given))
    (job,) = run.jobs
    assert job.trainable_token_indices == (7, 5)
    assert migration.left_out["bias"] == "Biases stay frozen."


def test_vera_of_peft(migrated):
    given = {"peft_type": "VERA", "r": 64, "vera_dropout": 0.1, "d_initial": 0.2}
    text = json.dumps(
        given
        | {"projection_prng_key": 3, "save_projection": True, "init_weights": True}
        | {"base_model_name_or_path": "org/base", "target_modules": ["q_proj"]}
    )
    migration, run = migrated(text)
    (job,) = run.jobs
    assert (job.use_vera, job.rank, job.dropout) == (True, 64, 0.1)
    assert (job.projection_prng_key, job.d_initial) == (3, 0.2)
    assert migration.left_out == {
        "save_projection": "The matrices are always saved beside the vectors."
    }


def test_peft(migrated):
    migration, run = migrated(PEFT)
    [job] = run.jobs
    assert settings(job, "rank", "lora_alpha", "dropout") == (16, 8.0, 0.1)
    assert job.target_modules == ("q_proj", "v_proj") and job.use_rslora
    assert job.rank_pattern == {"layers.0.*": 4}
    assert migration.left_out.keys() == {"task_type"}
    assert job.modules_to_save == ("lm_head",)


def test_whole_modules_of_other_tools(migrated):
    """One name or several, with others that are not trained."""
    given = {"model_name_or_path": "someone/Qwen-0.6B", "use_peft": True}
    text = json.dumps(given | {"lora_modules_to_save": ["lm_head", "norm"]})
    migration, run = migrated(text)
    assert run.jobs[0].modules_to_save == ("lm_head",)
    assert migration.left_out["lora_modules_to_save"].startswith("norm: only embed_tok")
    _, run = migrated(f"{LLAMA_FACTORY}\nadditional_target: embed_tokens,lm_head\n")
    assert run.jobs[0].modules_to_save == ("embed_tokens", "lm_head")


def test_trl(migrated):
    migration, run = migrated(TRL)
    [job] = run.jobs
    assert (run.model, run.quantize_base) == ("someone/Qwen-0.6B", "nf4")
    assert run.report_to == ("wandb",) and "mlflow" in migration.left_out["report_to"]
    # TRL's own default of lora_dropout is 0.05.
    assert settings(job, "rank", "lora_alpha", "dropout") == (32, 16.0, 0.05)
    assert settings(job, "batch_size", "epochs", "max_length") == (16, 2.0, 2048)
    assert settings(job, "warmup_ratio", "warmup_steps", "seed") == (0.1, None, 7)
    assert (job.data.split, job.data.loss_on) == ("train_sft", "completion")
    assert job.eval_data is not None and job.eval_data.split == "test_sft"
    assert settings(job, "eval_every", "keep_best") == (50, True)
    to_do = str(migration.to_do)
    assert "16 sequences of 2048 tokens" in to_do
    assert job.optimizer == "adafactor"
    wanted = {"push_to_hub", "run_name", "gradient_checkpointing_kwargs"}
    assert wanted <= migration.left_out.keys()


def test_defaults_of_trl(migrated):
    migration, run = migrated("dataset_name: records.jsonl\nuse_peft: true\n" + MODEL)
    [job] = run.jobs
    assert settings(job, "rank", "lora_alpha", "target_modules") == (
        *(16, 32.0),
        ("q_proj", "v_proj"),
    )
    assert settings(job, "learning_rate", "lr_schedule", "epochs") == (
        2e-5,
        "linear",
        3,
    )
    assert settings(job, "batch_size", "max_length") == (8, 1024)
    assert (job.data.path, job.data.split) == ("records.jsonl", None)
    assert "trains on every token of records with messages" in str(migration.to_do)


@pytest.mark.parametrize("kind", FILES)
def test_every_key_is_used_or_named(tmp_path, kind):
    """A key that nobody knows, and each of the others alone, is never just dropped."""

    def convert(**changes):
        (tmp_path / "other.json").write_text(json.dumps(given | changes))
        return migrate_file(tmp_path / "other.json")

    given = parse_yaml(FILES[kind], kind) | {"a_new_key": 3}
    before = convert()
    assert "not known" in before.left_out["a_new_key"]
    odd_values = itertools.cycle([3, [1], {"a": 1}, "-"])
    for key, value in given.items():
        if value in (None, "", False, [], {}):
            continue
        with contextlib.suppress(ConfigError):  # A wrong value is at most refused.
            convert(**{key: next(odd_values)})
        try:
            after = convert(**{key: None})
        except ConfigError:
            continue  # it cannot be left out
        is_told = (after.run_file, after.left_out, after.to_do) != (
            before.run_file,
            before.left_out,
            before.to_do,
        )
        assert is_told or key in IS_DEFAULT, key


# Keys whose values in the examples are the other tool's defaults.
IS_DEFAULT = {
    "finetuning_type",
    *("num_train_epochs", "lora_target", "lr_scheduler", "bias", "stage", "lora_r"),
    *("cutoff_len", "lora_alpha", "init_lora_weights", "gradient_accumulation_steps"),
    *("lora_target_linear", "sample_packing", "output_dir", "lora_rank"),
}


def test_values_that_cannot_be_converted(migrated):
    text = AXOLOTL_CHAT.replace("eval_steps: 20", "eval_steps: 0.25")
    text = text.replace("constant", "rex")
    migration, run = migrated(text)
    [job] = run.jobs
    assert (job.eval_every, job.early_stopping) == (None, None)
    assert {"eval_steps", "early_stopping_patience"} <= migration.left_out.keys()
    assert "rex" in migration.left_out["lr_schedule"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("base_model: m\n", "adapter is None"),
        ("base_model: m\nadapter: lora\nrl: grpo\n", "rl is 'grpo'"),
        ("base_model: m\nadapter: lora\nkd_trainer: true\n", "kd_trainer is True"),
        (AXOLOTL + "datasets: {path: a.jsonl}\n", "is not a list of data sets"),
        (AXOLOTL + "datasets: [a.jsonl]\n", "is not a list of data sets"),
        (AXOLOTL + "datasets: [{type: alpaca}]\n", "is not a list of data sets"),
        ("finetuning_type: full\n", "finetuning_type is 'full'"),
        (ON_DATA + "export_dir: merged\n", "export_dir is set"),
        (MODEL + "dataset_name: a\n", "use_peft is not true"),
        (MODEL + "use_peft: true\nreward_funcs: x\n", "reward_funcs is a setting"),
        ("use_peft: true\n", "model"),
        ("finetuning_type: lora\nstage: ppo\n", "stage is 'ppo'"),
        ('{"peft_type": "IA3"}', "peft_type is 'IA3'"),
        ("model: m\njobs: []\n", "is not a file that can be converted"),
        ("- 3\n", "is not a mapping"),
    ],
)
def test_files_that_cannot_be_converted(migrated, text, match):
    with pytest.raises(ConfigError, match=re.escape(match)):
        migrated(text)


def test_the_command(tmp_path, capsys):
    source, out = tmp_path / "axolotl.yml", tmp_path / "run.yaml"
    source.write_text(AXOLOTL_ALPACA)
    assert main(["migrate", str(source)]) == 0
    printed = capsys.readouterr().out
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    assert out.read_text() == printed
    ended = capsys.readouterr()
    assert f"next: jaxlora plan {out}" in ended.out
    assert "left out: evals_per_epoch: 4: eval_every is a number" in ended.err
    assert "number of training records divided by 8 x 4." in ended.err
    assert isinstance(load_run(out), RunConfig)
    assert main(["migrate", str(source), "-o", str(out)]) == 1
    assert "File exists" in capsys.readouterr().err


def test_variants_and_starts_are_kept(migrated):
    text = PEFT.replace('"use_dora": false', '"use_dora": true')
    text = text.replace('"init_lora_weights": true', '"init_lora_weights": "gaussian"')
    _, run = migrated(text)
    assert run.jobs[0].use_dora and run.jobs[0].init_lora_weights == "gaussian"
    for more, wanted in {
        "": "pissa_niter_16",
        "pissa_iter: -1\n": "pissa",
        "pissa_iter: 4\npissa_convert: true\n": "pissa_niter_4",
    }.items():
        migration, run = migrated(LLAMA_FACTORY + "pissa_init: true\n" + more)
        assert run.jobs[0].init_lora_weights == wanted
        assert not any("pissa" in key for key in migration.left_out)
    migration, run = migrated(PEFT.replace(': true, "modules', ': "corda", "modules'))
    assert run.jobs[0].init_lora_weights is True
    assert "'corda' cannot be used here" in migration.left_out["init_lora_weights"]
