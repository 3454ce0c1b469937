"""Files for training on preferences become jobs with the same objective."""

import json

import pytest

from jaxlora.errors import ConfigError
from tests.jaxlora.migrate.texts import AXOLOTL, ON_DATA

TRL = "model_name_or_path: m\ndataset_name: d.jsonl\nuse_peft: true\n"
PAIRS = "datasets: [{path: a.jsonl, type: chat_template.default}]\n"
LLAMA = ON_DATA + "dataset_dir: nowhere\n"
KEPT = {
    "trl dpo": (
        TRL + "beta: 0.2\nloss_type: ipo\nlora_dropout: 0.1\n",
        ("dpo", {"beta": 0.2, "loss_type": "ipo"}),
    ),
    "trl beta": (TRL + "beta: 0.2\n", ("dpo", {"beta": 0.2})),
    "trl reference": (
        TRL + "beta: 0.2\nref_adapter_name: sft\nmodel_adapter_name: train\n",
        ("dpo", {"beta": 0.2, "reference": "sft"}),
    ),
    "trl list": (
        TRL + "loss_type: [sigmoid]\nlabel_smoothing: 0.1\n",
        ("dpo", {"loss_type": "sigmoid", "label_smoothing": 0.1}),
    ),
    "trl kto": (
        TRL + "desirable_weight: 1.5\ntrain_sampling_strategy: sequential\n",
        ("kto", {"desirable_weight": 1.5}),
    ),
    "trl apo": (
        TRL + "loss_type: apo_zero_unpaired\nbeta: 0.2\n",
        ("kto", {"loss_type": "apo_zero_unpaired", "beta": 0.2}),
    ),
    "trl cpo": (TRL + "cpo_alpha: 0.5\n", ("cpo", {"cpo_alpha": 0.5})),
    "trl simpo": (
        TRL + "loss_type: simpo\ncpo_alpha: 0.0\nbeta: 2.0\n",
        ("simpo", {"beta": 2.0, "cpo_alpha": 0.0}),
    ),
    "trl reward": (
        TRL + "center_rewards_coefficient: 0.01\n",
        ("reward", {"center_rewards_coefficient": 0.01}),
    ),
    "axolotl dpo": (
        AXOLOTL + PAIRS + "rl: dpo\nrl_beta: 0.3\n",
        ("dpo", {"beta": 0.3}),
    ),
    "axolotl ipo": (AXOLOTL + PAIRS + "rl: ipo\n", ("dpo", {"loss_type": "ipo"})),
    "axolotl simpo": (
        AXOLOTL + PAIRS + "rl: simpo\nsimpo_gamma: 0.7\n",
        ("simpo", {"beta": 0.1, "cpo_alpha": 1.0, "simpo_gamma": 0.7}),
    ),
    "axolotl orpo": (
        AXOLOTL + PAIRS + "rl: orpo\norpo_alpha: 0.2\n",
        ("orpo", {"beta": 0.2}),
    ),
    "axolotl kto": (
        AXOLOTL + PAIRS + "rl: kto\nkto_undesirable_weight: 0.5\n",
        ("kto", {"undesirable_weight": 0.5}),
    ),
    "axolotl reward": (
        AXOLOTL + PAIRS + "reward_model: true\ncenter_rewards_coefficient: 0.1\n",
        ("reward", {"center_rewards_coefficient": 0.1}),
    ),
    "llama_factory dpo": (
        LLAMA + "stage: dpo\ndpo_label_smoothing: 0.1\n",
        ("dpo", {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.1}),
    ),
    "llama_factory simpo": (
        LLAMA + "stage: dpo\npref_loss: simpo\npref_beta: 2.0\nsimpo_gamma: 0.5\n",
        ("simpo", {"beta": 2.0, "simpo_gamma": 0.5}),
    ),
    "llama_factory orpo": (
        LLAMA + "stage: dpo\npref_loss: orpo\n",
        ("orpo", {"beta": 0.1}),
    ),
    "llama_factory kto": (
        LLAMA + "stage: kto\nkto_rejected_weight: 0.5\n",
        ("kto", {"beta": 0.1, "undesirable_weight": 0.5}),
    ),
    "llama_factory rm": (LLAMA + "stage: rm\n", ("reward", {})),
    "llama_factory reference": (
        LLAMA + "stage: kto\nref_model: m\nref_model_adapters: saves/sft\n",
        ("kto", {"beta": 0.1, "reference": "saves/sft"}),
    ),
    "llama_factory base": (
        LLAMA + "stage: kto\nref_model: m\n",
        ("kto", {"beta": 0.1}),
    ),
}


@pytest.mark.parametrize(("text", "wanted"), KEPT.values(), ids=KEPT)
def test_the_objective_is_kept(migrated, text, wanted):
    migration, run = migrated(text)
    (job,) = run.jobs
    assert (job.objective, job.objective_args) == wanted
    assert job.dropout == 0
    assert any("Means of the loss" in line for line in migration.to_do)
    assert not any("not known" in why for why in migration.left_out.values())


def test_dropout_and_rates_are_those_of_the_tool(migrated):
    migration, run = migrated(KEPT["trl dpo"][0])
    assert "lora_dropout" in migration.left_out
    assert run.jobs[0].learning_rate == 1e-6
    _, run = migrated(KEPT["trl dpo"][0] + "disable_dropout: false\n")
    assert run.jobs[0].dropout == 0.1
    _, run = migrated(KEPT["trl reward"][0])
    assert (run.jobs[0].learning_rate, run.jobs[0].too_long) == (1e-4, "drop")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("trl beta", "names no trainer"),
        ("trl reference", "folder of the adapter that the script loads as 'sft'"),
        ("trl list", "ignores it with the loss `sigmoid` since 0.29"),
        ("llama_factory orpo", "each chosen answer"),
        ("llama_factory kto", "over 1000 records"),
        ("llama_factory rm", "has a bias"),
    ],
)
def test_what_another_tool_computes_otherwise_is_said(migrated, name, line):
    migration, _ = migrated(KEPT[name][0])
    assert any(line in text for text in migration.to_do)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (TRL + "loss_type: exo_pair\nbeta: 0.1\n", "'exo_pair' has no counterpart"),
        (TRL + "beta: 0.1\nrpo_alpha: 1.0\n", "rpo_alpha is 1.0, which changes the"),
        (TRL + "beta: 0.1\nf_divergence_type: js_divergence\n", "f_divergence_type is"),
        (TRL + "beta: -1\n", "beta: must be greater than 0 .given: -1"),
        (TRL + "num_generations: 4\n", "training on generated answers"),
        (AXOLOTL + PAIRS + "rl: grpo\n", "rl is 'grpo', which jaxlora does not train"),
        (AXOLOTL + PAIRS + "rl: dpo\ndpo_use_weighting: true\n", "dpo_use_weighting"),
        (LLAMA + "stage: dpo\npref_loss: kto_pair\n", "'kto_pair' has no counterpart"),
        (LLAMA + "stage: dpo\npref_ftx: 1.0\n", "pref_ftx is 1.0"),
        (
            LLAMA + "stage: dpo\nref_model: other\nref_model_adapters: a\n",
            "ref_model is 'other', which changes the loss",
        ),
        (LLAMA + "stage: ppo\n", "stage: sft, pt, dpo, kto or rm"),
    ],
)
def test_what_has_no_counterpart_is_refused(migrated, text, match):
    with pytest.raises(ConfigError, match=match):
        migrated(text)


def test_neutral_values_are_no_obstacle(migrated):
    _, run = migrated(
        TRL + "beta: 0.1\nf_divergence_type: reverse_kl\nld_alpha: null\n"
    )
    assert run.jobs[0].objective == "dpo"


INFO = {
    "pairs": {"file_name": "a.json", "ranking": True},
    "named": {
        "file_name": "a.json",
        "ranking": True,
        "columns": {"prompt": "q", "query": "", "chosen": "good", "rejected": "bad"},
    },
    "spoken": {
        "file_name": "a.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {
            "messages": "talk",
            "chosen": "good",
            "rejected": "bad",
            "system": "about",
        },
        "tags": {"assistant_tag": "Ann"},
    },
    "labels": {
        "file_name": "a.json",
        "columns": {"prompt": "q", "response": "a", "kto_tag": "ok", "system": "s"},
    },
}


@pytest.mark.parametrize(
    ("name", "stage", "wanted"),
    [
        (
            "pairs",
            "dpo",
            {"prompt": "{{ instruction }}\n{{ input }}", "chat": True},
        ),
        ("named", "rm", {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        (
            "spoken",
            "dpo",
            {
                "prompt": "talk",
                "chosen": "good",
                "rejected": "bad",
                "system": "about",
                "roles": {"Ann": "assistant"},
            },
        ),
        (
            "labels",
            "kto",
            {"prompt": "q", "completion": "a", "label": "ok", "system": "s"},
        ),
    ],
)
def test_fields_of_llama_factory(migrated, tmp_path, name, stage, wanted):
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    text = f"model_name_or_path: m\nfinetuning_type: lora\nstage: {stage}\n"
    text += f"dataset_dir: {tmp_path}\ndataset: {name}\n"
    _, run = migrated(text)
    data = run.jobs[0].data.model_dump()
    assert {key: data[key] for key in wanted} == wanted
    other = "kto" if name != "labels" else "dpo"
    with pytest.raises(ConfigError, match="learns from"):
        migrated(text.replace(f"stage: {stage}", f"stage: {other}"))
