"""Settings of other tools become those of a job."""

import pytest

from tests.jaxlora.migrate.texts import MODEL, ON_DATA, ON_FILE


@pytest.mark.parametrize(
    ("text", "wanted", "said"),
    [
        (ON_FILE, {"warmup_ratio": 0.03}, "Axolotl warms up for 3%"),
        (ON_FILE + "warmup_steps: 0\n", {"warmup_steps": 0, "warmup_ratio": 0.0}, ""),
        (ON_FILE + "lr_scheduler: constant\n", {"warmup_ratio": 0.0}, ""),
        (ON_FILE + "micro_batch_size: 2\nbatch_size: 6\n", {"batch_size": 6}, ""),
        (ON_FILE + "max_grad_norm: 0\n", {"max_grad_norm": None}, ""),
        (ON_FILE + "max_steps: -1\n", {"steps": None}, ""),
        (ON_FILE + "curriculum_sampling: true\n", {"shuffle": False}, ""),
        (
            ON_FILE + "lr_scheduler: rex\n",
            {"lr_schedule": "cosine"},
            "The default is used: 'cosine'",
        ),
        (
            ON_FILE + "optimizer: came_pytorch\n",
            {"optimizer": "adamw"},
            "optimizer: came_pytorch is replaced by AdamW",
        ),
        (
            ON_FILE + "optimizer: adafactor\noptim_args: clip_threshold=2, eps=1\n",
            {"optimizer": "adafactor", "optimizer_args": {"clip_threshold": 2.0}},
            "optim_args: eps=1.0: adafactor has no such settings",
        ),
        (
            ON_FILE + "optimizer: adamw_bnb_8bit\n",
            {"optimizer": "adamw"},
            "adamw_bnb_8bit: the optimizer is adamw, and its state is float32",
        ),
        (
            ON_FILE + "optimizer: paged_adamw_8bit\n",
            {"optimizer": "adamw"},
            "is adamw, and its state stays on the device, and its state is float32",
        ),
        (ON_FILE + "optimizer: lion_32bit\n", {"optimizer": "lion"}, "is lion."),
        (
            ON_FILE + "optimizer: sgd\noptim_args: {momentum: 0.9, nesterov: true}\n",
            {"optimizer_args": {"momentum": 0.9, "nesterov": True}},
            "",
        ),
        (
            ON_FILE + "optimizer: schedule_free_adamw\nlr_scheduler: cosine\n",
            {"optimizer": "schedule_free_adamw", "lr_schedule": "constant"},
            "cosine: schedule_free_adamw averages weights",
        ),
        (ON_DATA + "use_muon: true\n", {"optimizer": "muon"}, "as Moonlight does"),
        (
            ON_DATA + "lr_scheduler_type: cosine_with_restarts\n"
            "lr_scheduler_kwargs: {num_cycles: 3}\n",
            {
                "lr_schedule": "cosine_with_restarts",
                "lr_schedule_args": {"num_cycles": 3},
            },
            "",
        ),
        (
            MODEL + "use_peft: true\nlr_scheduler_type: polynomial\n"
            "lr_scheduler_kwargs: '{\"power\": 2}'\n",
            {"lr_schedule": "polynomial", "lr_schedule_args": {"power": 2}},
            "",
        ),
        (
            ON_FILE + "lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n",
            {"lr_schedule": "cosine_with_min_lr", "warmup_ratio": 0.03},
            "",
        ),
        (
            ON_DATA + "lr_scheduler_type: warmup_stable_decay\n",
            {"lr_schedule": "cosine"},
            "give num_decay_steps, the optimizer steps of the decay. The default is",
        ),
        (
            ON_FILE + "optimizer: paged_lion_8bit\nadam_beta1: 0.95\n",
            {"optimizer": "lion", "optimizer_args": {"b1": 0.95, "b2": 0.999}},
            "device, and its state is float32",
        ),
        (
            ON_FILE + "lora_model_dir: old\nlora_r: 4\n",
            {"init_from": "old", "rank": 16},
            "rank: It is taken from the adapter in old",
        ),
        (
            ON_FILE + "val_set_size: 0.1\ntest_datasets: [{path: b.json}]\n",
            {"eval_fraction": 0.0},
            "val_set_size: 0.1: there is a data set of held-out records",
        ),
        (
            ON_FILE + "peft_init_lora_weights: eva\npeft_eva_config: {rho: 3}\n",
            {"init_lora_weights": True},
            "init_lora_weights: 'eva' cannot be used here (expected true, gaussian",
        ),
        (ON_FILE + "eot_tokens: [a]\nliger_rope: true\n", {}, "liger_rope: The kern"),
        (ON_DATA + "adapter_name_or_path: old\n", {"init_from": "old"}, "alpha: It is"),
        (ON_DATA + "eval_dataset: b\n", {}, "eval_data.path: look up 'b'"),
        (ON_DATA, {}, "set kind: alpaca and chat: true"),
        (ON_DATA + "dataset_dir: ONLINE\n", {}, "a is a data set on the hub"),
        (MODEL + "lora_rank: 4\n", {"rank": 4, "lora_alpha": 8.0}, ""),
        (MODEL + "use_peft: true\ndtype: float32\n", {}, "dtype: Set dtype of the run"),
        (
            MODEL + "use_peft: yes\neval_strategy: no\ncompletion_only_loss: false\n",
            {"eval_data": None},
            "loss_on: all",
        ),
        (
            MODEL + "r: 4\ntarget_modules: all-linear\nlora_alpha: 4\n"
            "per_device_train_batch_size: 1\ntest_split_size: 0.1\n",
            {"rank": 4, "target_modules": "all-linear", "eval_fraction": 0.1},
            "",
        ),
    ],
)
def test_settings_of_a_job(migrated, text, wanted, said):
    migration, run = migrated(text)
    assert {key: getattr(run.jobs[0], key) for key in wanted} == wanted
    assert said in migration.text("a.yml")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (ON_FILE + "tokens: [a]\n", "tokens"),
        (ON_FILE + "special_tokens: {bos_token: <x>}\n", "special_tokens"),
        (ON_FILE + "resize_token_embeddings_to_32x: true\n", "resize_token_embedd"),
        (ON_DATA + "new_special_tokens: <a>,<b>\n", "new_special_tokens"),
        (ON_DATA + "add_tokens: a,b\n", "add_tokens"),
        (ON_DATA + "add_special_tokens: <a>,<b>\n", "add_special_tokens"),
        (ON_DATA + "resize_vocab: true\n", "resize_vocab"),
    ],
)
def test_new_tokens_are_left_out_with_the_reason(migrated, text, key):
    migration, _ = migrated(text)
    (reason,) = (r for k, r in migration.left_out.items() if k.startswith(key))
    assert "rows of new tokens cannot be trained yet" in reason
    assert "trainable_token_indices trains rows that it has" in reason


def test_texts_of_tokens_are_left_out_with_the_reason(migrated):
    migration, _ = migrated(ON_FILE + "added_tokens_overrides: {128041: <x>}\n")
    assert "tokenizer.json" in migration.left_out["added_tokens_overrides"]


def test_words_of_yaml_1_1(migrated):
    """The other tools read `no` as false, and YAML 1.2 as a text."""
    _, run = migrated(ON_FILE + "load_in_4bit: no\nload_in_8bit: Yes\n")
    assert run.quantize_base == "int8"
