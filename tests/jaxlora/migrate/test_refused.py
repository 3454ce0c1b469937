"""A setting that cannot be converted is refused, or named with what to use instead."""

import json
import re

import pytest

from jaxlora.cli.main import main
from jaxlora.common.yaml_file import parse_yaml
from jaxlora.errors import ConfigError
from jaxlora.migrate import migrate_file
from jaxlora.migrate.unsupported import find_doubt
from tests import tiny
from tests.jaxlora.migrate.texts import AXOLOTL, MODEL, ON_DATA, ON_FILE

BREAKS = ("\n", "\r", "\r\n", "\x85", "\u2028", "\u2029", "\x0b", "\x1b[2J", "\u202e")


@pytest.mark.parametrize("line_break", BREAKS)
def test_a_line_break_in_a_key_or_a_value(tmp_path, capsys, line_break):
    """It stays in its comment, or in its text."""
    forged = f"x{line_break}output_dir: forged"
    values = {
        "base_model": forged,
        "adapter": "lora",
        "learning_rate": 1e-4,
        "datasets": [{"path": forged, "name": forged, forged: 3, "type": forged}],
        "eval_steps": forged,
        "optimizer": forged,
        "special_tokens": {"eos_token": forged},
        forged: forged,
    }
    source, out = tmp_path / f"other{line_break}output_dir.json", tmp_path / "run.yaml"
    source.write_text(json.dumps(values))
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    written = out.read_bytes().decode()
    run = parse_yaml(written, "run.yaml")
    assert run == json.loads(json.dumps(migrate_file(source).run_file))
    assert run["model"] == forged and run["output_dir"] == "./model-out"
    err = capsys.readouterr().err
    assert not re.search("^output_dir: forged", written + err, re.MULTILINE)
    for text in (written, err):
        lines = text.replace("\n", "")
        assert all(c.isprintable() for c in lines), text


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000, "9" * 3000])
@pytest.mark.parametrize(
    "text",
    [
        AXOLOTL + "datasets: [{path: a.jsonl, split: 'train[:N]'}]\n",
        ON_FILE + "micro_batch_size: N\ngradient_accumulation_steps: N\n",
        ON_FILE + "lora_r: N\nsequence_len: N\nsample_packing: true\n",
        ON_DATA + "lora_rank: N\nval_size: N\nmax_samples: N\n",
        MODEL + "use_peft: true\nlora_r: N\nwarmup_steps: N\n",
        "peft_type: LORA\nbase_model_name_or_path: m\nr: N\n",
    ],
)
def test_long_numbers(tmp_path, text, number):
    """They are named or refused, never computed with."""
    path = tmp_path / "other.yml"
    path.write_text(text.replace("N", number))
    try:
        migration = migrate_file(path)
    except ConfigError as error:
        assert "digits" in str(error)
    else:
        assert "datasets.0.split" in migration.text("other.yml")


@pytest.mark.parametrize(
    "model",
    [
        "mistralai/Mixtral-8x7B-v0.1",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "ISTA-DASLab/Meta-Llama-3-8B-Instruct-AQLM-2Bit-1x16",
        "TechxGenus/Meta-Llama-3-8B-Instruct-AWQ",
        "TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ",
        "RedHatAI/Llama-3-8B-quantized.w4a16",
        "TheBloke/Llama-2-7B-GGUF",
        "microsoft/Phi-3-mini-4k-instruct",
        "deepseek-ai/DeepSeek-R1",
        "meta-llama/Llama-4-Scout-17B-16E",
        "google/gemma-2b",
        "google/gemma-3-4b-it",
        "openai/gpt-oss-20b",
        "tiiuae/falcon-7b",
        "zai-org/GLM-4.5-Air",
    ],
)
def test_models_that_are_not_supported_are_named(migrated, model):
    migration, _ = migrated(ON_DATA.replace(": m\n", f": {model}\n"))
    assert migration.to_do[0].startswith("model: ") and model in migration.to_do[0]
    assert re.search("Use (a|the original) model|Convert its", migration.to_do[0])


@pytest.mark.parametrize(
    "model",
    [
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen2.5-Coder-7B",
        "Qwen/Qwen1.5-7B",
        "google/gemma-2-2b-it",
        "google/gemma-3-1b-it",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "mistralai/Mistral-7B-v0.1",
        "unsloth/llama-3-8b-bnb-4bit",
        "RedHatAI/Llama-3-8B-quantized.w8a8",
        "Qwen/Qwen3-8B-FP8",
        "models/tiny",
    ],
)
def test_models_that_are_supported_are_not(model):
    assert find_doubt(model) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "phi"}, "model_type='phi'. Supported: llama"),
        ({"num_local_experts": 8}, "mixture-of-experts models are not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq', which"),
    ],
)
def test_a_model_that_is_here_is_read(tmp_path, migrated, change, match):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | change))
    with pytest.raises(ConfigError, match=re.escape(match)):
        migrated(ON_DATA.replace(": m\n", f": {folder}\n"))


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (ON_DATA + "quantization_bit: 3\n", "quantization_bit", "3 bits: it is not"),
        (
            ON_DATA + "quantization_bit: 4\nquantization_method: hqq\n",
            "quantization_method",
            "hqq: it is not supported. quantize_base has nf4",
        ),
        (ON_FILE + "gptq: true\n", "gptq", "GPTQ: it is not supported"),
        (
            ON_FILE + "evals_per_epoch: 4\nmicro_batch_size: 2\nval_set_size: 0.1\n",
            "evals_per_epoch",
            "number of training records divided by 2 x 4.",
        ),
        (
            ON_DATA + "eval_strategy: epoch\nper_device_train_batch_size: 3\n",
            "eval_strategy",
            "number of training records divided by 3.",
        ),
    ],
)
def test_settings_are_left_out_with_what_to_use(migrated, text, key, said):
    migration, _ = migrated(text)
    assert said in migration.left_out[key]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "base_model: m\n"),
        ("train.ipynb", '{"cells": []}'),
        ("train", "#!/usr/bin/env python\nfrom trl import SFTTrainer\n"),
        ("train.txt", "# Trains.\nimport torch\n\nbase_model = 'm'\n"),
    ],
)
def test_a_python_program_points_to_the_how_to(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"docs/howto/from_peft\.md"):
        migrate_file(tmp_path / name)
