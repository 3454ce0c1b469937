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
            ON_FILE + "optimizer: adafactor\n",
            {"optimizer": "adamw"},
            "optimizer: adafactor is replaced by AdamW",
        ),
        (
            ON_FILE + "optimizer: paged_lion_8bit\nadam_beta1: 0.95\n",
            {"optimizer": "lion", "optimizer_args": {"b1": 0.95, "b2": 0.999}},
            "the optimizer is lion, and its state is float32",
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


def test_words_of_yaml_1_1(migrated):
    """The other tools read `no` as false, and YAML 1.2 as a text."""
    _, run = migrated(ON_FILE + "load_in_4bit: no\nload_in_8bit: Yes\n")
    assert run.quantize_base == "int8"
