"""Names of PEFT, TRL, transformers, Axolotl, LLaMA-Factory and Unsloth."""

import pathlib
import re

import pytest

from jaxlora import DataConfig, LoraJob, RunConfig
from jaxlora.config.aliases import HINTS_IF_OFF, RUN_NAMES
from jaxlora.config.run_file import run_config
from jaxlora.errors import ConfigError

KINDS = LoraJob, RunConfig, DataConfig
DOCS = pathlib.Path(__file__).parents[2] / "docs"
# A value for each of our names that has others, other than its default.
VALUES = {
    "rank": 3,
    "dropout": 0.25,
    "target_modules": ("q_proj",),
    "modules_to_save": ("lm_head",),
    "use_rslora": True,
    "use_dora": True,
    "init_lora_weights": "gaussian",
    "layers_pattern": "blocks",
    "layers_to_transform": (0, 2),
    "lora_plus_ratio": 16.0,
    "epochs": 2.0,
    "steps": 7,
    "lr_schedule": "linear",
    "lr_schedule_args": {"num_cycles": 0.4},
    "adam_b1": 0.8,
    "adam_b2": 0.95,
    "adam_eps": 1e-6,
    "max_length": 77,
    "eval_every": 5,
    "early_stopping": 2,
    "early_stopping_delta": 0.01,
    "keep_best": True,
    "model": "m",
    "revision": "main",
    "keep_checkpoints": 9,
    "text": "body",
    "limit": 4,
}
NAMES = [(kind, o, ours) for kind in KINDS for o, ours in kind.aliases.items()]


def make(kind: type, **settings):
    if kind is RunConfig:
        required = {"jobs": [make(LoraJob)]}
        names = {"model"} | {o for o, ours in RUN_NAMES.items() if ours == "model"}
        required |= {} if settings.keys() & names else {"model": "m"}
    elif kind is LoraJob:
        evaluated = {"eval_fraction": 0.1, "eval_every": 1}
        required = {"name": "a", "data": {"path": "p"}} | evaluated
        if settings.keys() & {"eval_every", "eval_steps"}:
            del required["eval_every"]
        if any("layers_pattern" in name for name in settings):
            required["layers_to_transform"] = (0,)
    else:
        required = {"path": "p"}
    return kind(**required | settings)


@pytest.mark.parametrize(("kind", "other", "ours"), NAMES)
def test_a_name_of_another_tool(kind, other, ours):
    found = make(kind, **{other: VALUES[ours]})
    assert found == make(kind, **{ours: VALUES[ours]})
    assert getattr(found, ours) == VALUES[ours]
    assert ours in found.model_fields_set
    with pytest.raises(ConfigError, match=f"{other}.*two names of") as e:
        make(kind, **{ours: VALUES[ours], other: VALUES[ours]})
    assert f"'{ours}' and '{other}'" in str(e.value)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_consistent(kind):
    fields = kind.model_fields
    assert set(kind.aliases.values()) <= fields.keys()
    assert not kind.aliases.keys() & fields.keys()
    assert not kind.hints.keys() & (fields.keys() | kind.aliases.keys())
    assert all(hint.endswith(".") for hint in kind.hints.values())


def test_a_setting_that_has_to_be_converted():
    for place in ("jobs.0", "defaults"):
        job = {"name": "a", "data": {"path": "p"}}
        other = {"micro_batch_size": 2}
        given = {"jobs": [job | other]} if place == "jobs.0" else {"jobs": [job]}
        given |= {"defaults": other} if place == "defaults" else {}
        place = rf"{place}\.micro_batch_size: "
        with pytest.raises(ConfigError, match=rf"{place}.* 2 x 4 x 1 = 8"):
            run_config({"model": "m", **given})
    with pytest.raises(ConfigError, match="Set `quantize_base: nf4` for the run"):
        run_config({"model": "m", "jobs": [job], "load_in_4bit": True})


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ({"lr": 1e-3}, "'lr' is not a setting here. Set learning_rate"),
        ({"load_in_4bit": False}, r"Leave it out\.$"),
        ({"load_in_4bit": None}, r"Leave it out\.$"),
        ({"load_in_8bit": "false"}, r"Leave it out\.$"),
        ({"bf16": False}, r"Leave it out; for float32, set `dtype: float32`"),
        ({"bf16": True}, r"Set dtype of the run"),
        ({"save_strategy": "no"}, r"Set `checkpoint_every: null` of the run, for"),
        ({"save_steps": 500}, r"Set checkpoint_every of the run, in rounds"),
        ({"save_steps": None}, r"Leave it out\.$"),
        ({"wandb_project": ""}, r"Leave it out\.$"),
        ({"fsdp": []}, r"Leave it out\.$"),
        ({"val_set_size": 0.0}, r"Leave it out\.$"),
        ({"train_on_inputs": False}, r"Leave it out\.$"),
        ({"completion_only_loss": False}, r"Set `loss_on: all` in data"),
        ({"completion_only_loss": None}, r"Leave it out\.$"),
        ({"gradient_checkpointing": False}, r"Leave it out\.$"),
        ({"packing": False}, r"Leave it out: samples are always packed"),
        ({"train_bias": True}, r"Leave it out: norms and biases stay frozen"),
        ({"loftq_config": {"loftq_bits": 4}}, r"Set init_lora_weights to pissa or"),
    ],
)
def test_hints_answer_the_value(setting, hint):
    for kind in (LoraJob, RunConfig):
        ours, refused = kind.known(setting)
        assert not ours
        (reason,) = refused.values()
        assert re.search(hint, reason)
    known = {key for kind in KINDS for key in kind.hints}
    assert HINTS_IF_OFF.keys() <= known


def test_two_names_may_be_given_in_defaults_and_in_a_job():
    """The job's own counts, whatever it is called."""
    job = {"name": "a", "data": {"path": "p"}, "lora_r": 4}
    found = run_config({"model": "m", "jobs": [job], "defaults": {"r": 8}})
    assert found.jobs[0].rank == 4
    with pytest.raises(ConfigError, match="'r' and 'rank' are two names"):
        run_config({"model": "m", "jobs": [job], "defaults": {"r": 8, "rank": 8}})


def test_replace_takes_other_names():
    assert make(LoraJob, rank=3).replace(r=5).rank == 5


def test_a_setting_in_the_wrong_place():
    job = {"name": "a", "data": {"path": "p"}}
    with pytest.raises(ConfigError, match=r"'r' is a setting of a job\. Put it there"):
        run_config({"model": "m", "jobs": [job], "r": 8})
    with pytest.raises(ConfigError, match="'mesh' is a setting of the run"):
        run_config({"model": "m", "jobs": [job | {"mesh": "fsdp=2"}]})
    with pytest.raises(ConfigError, match=r"'chat' is a setting of data\. Put it"):
        run_config({"model": "m", "jobs": [job | {"chat": True}]})


def test_the_documentation_lists_all_names():
    lines = (DOCS / "run_file.md").read_text().splitlines()
    for kind in KINDS:
        for other, ours in kind.aliases.items():
            assert any(f"`{other}`" in x and f"| `{ours}` |" in x for x in lines)
