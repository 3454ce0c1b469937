"""Kinds of inputs: files of other tools, which become run files."""

import json
import pathlib
import random

import yaml

from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config.run_file import load_run
from jaxlora.migrate import migrate_file
from jaxlora.printable import has_invisible
from tests.fuzz.kind import Kind
from tests.fuzz.mutate import Damage, damage_bytes, damage_value, to_json

FILES = {
    "axolotl.yml": {
        "base_model": "m",
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_modules": ["q_proj"],
        "datasets": [{"path": "me/d", "type": "alpaca", "split": "train[:9]"}],
        "test_datasets": [{"path": "b.jsonl", "type": {"format": "{instruction}"}}],
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "sample_packing": True,
        "evals_per_epoch": 4,
        "eval_steps": 0.5,
        "optimizer": "adamw_torch",
        "special_tokens": {"eos_token": "</s>"},
    },
    "llama_factory.yaml": {
        "model_name_or_path": "m",
        "finetuning_type": "lora",
        "stage": "sft",
        "lora_rank": 8,
        "lora_target": "q_proj,v_proj",
        "dataset": "a",
        "eval_dataset": "b",
        "max_samples": 9,
        "quantization_bit": 4,
        "quantization_method": "hqq",
        "report_to": ["wandb", "other"],
    },
    "trl.yaml": {
        "model_name_or_path": "m",
        "use_peft": True,
        "lora_r": 8,
        "dataset_name": "me/d",
        "dataset_config": "en",
        "eval_strategy": "epoch",
        "warmup_steps": 0.1,
        "packing": True,
    },
    "adapter_config.json": {
        "peft_type": "LORA",
        "base_model_name_or_path": "m",
        "r": 8,
        "target_modules": ["q_proj"],
        "rank_pattern": {"q_proj": 4},
    },
}
_FORGED = ("\nmodel: forged", "\r", "\x85", "\u2028", "\x1b[2J", "\u202e", "\ud800")


def make_files(folder: pathlib.Path) -> None:
    for name, settings in FILES.items():
        (folder / name).write_text(yaml.safe_dump(settings))


def damage_settings(content: bytes, rng: random.Random) -> Damage:
    """Changes bytes, a value, or a key."""
    if rng.random() < 0.2:
        return damage_bytes(content, rng)
    settings = yaml.safe_load(content)
    if rng.random() < 0.3:
        key, mark = rng.choice(list(settings)), rng.choice(_FORGED)
        settings[f"{key}{mark}"] = settings[key]
        return f"a key {key}{mark!r}", json.dumps(settings).encode()
    what, value = damage_value(settings, rng)
    return what, to_json(value)  # which is YAML


def read_files(folder: pathlib.Path) -> None:
    """Converts each; the run file holds the settings, and a safe comment."""
    for name in FILES:
        migration = migrate_file(folder / name)
        text = migration.text(name)
        (folder / "run.out").write_text(text)
        kept = parse_yaml(text, "run.out")
        assert kept == json.loads(json.dumps(migration.run_file)), name
        assert not has_invisible(text.replace("\n", "").replace("\t", "")), name
        load_run(folder / "run.out")


KINDS = {
    "migrate": Kind(
        make=make_files,
        targets=tuple(FILES),
        damage=damage_settings,
        read=read_files,
        num_cases=120,
        # As a run file, such a file may come through a pipe.
        entries=("folder", "missing", "loop", "dangling"),
    )
}
