"""A job that contradicts the adapter it starts from is told all that has to change."""

import dataclasses
import re

import numpy as np
import pytest
import yaml

from jaxlora import LoraJob, export_peft
from jaxlora.adapters.adapter import Adapter, LoraWeights, OutsideWeights
from jaxlora.errors import ConfigError
from jaxlora.models.registry import model_config
from jaxlora.models.structure import linear_shapes
from jaxlora.modules.trained_tensors import tensors_with
from jaxlora.modules.variants.vera import VeraMatrices
from jaxlora.plan.job.chosen_modules import choose_modules
from tests import tiny

# The head has rows of its own.
UNTIED = model_config(tiny.CONFIG | {"tie_word_embeddings": False})
TIED = dataclasses.replace(UNTIED, tie_embeddings=True)
SHAPES = linear_shapes(UNTIED)
V, D = UNTIED.vocab_size, UNTIED.hidden_size


def outside(**tokens) -> dict[str, OutsideWeights]:
    return {
        name: OutsideWeights(np.ones((len(own) or V, D), np.float32), own)
        for name, own in tokens.items()
    }


def adapter(
    settings=(), rank=4, suffixes=("q_proj", "o_proj"), alpha=8.0, **options
) -> Adapter:
    modules = {}
    for number, (name, (k, n)) in enumerate(SHAPES.items()):
        if name.endswith(suffixes):
            own = rank if isinstance(rank, int) else rank[number % len(rank)]
            tensors = {
                tensor.name: np.ones(tensor.shape(k, n, own), np.float32)
                for tensor in tensors_with(lambda setting: setting in settings)
            }
            modules[name] = LoraWeights(tensors=tensors, rank=own, lora_alpha=alpha)
    if "use_vera" in settings:
        sizes = [SHAPES[name] for name in modules]
        k, n = (max(axis) for axis in zip(*sizes, strict=True))
        options["vera"] = VeraMatrices(options.pop("key", 0), rank, k, n)
    return Adapter(modules=modules, **options)


VERA = {"settings": ("use_vera",), "alpha": 4.0}
FOLDERS = {
    "lora": {},
    "ranks": {"rank": (2, 4)},
    "rslora": {"use_rslora": True},
    "mlp": {"suffixes": ("up_proj",)},
    "dora": {"settings": ("use_dora",)},
    "dora of rank 3": {"settings": ("use_dora",), "rank": 3},
    "vera": VERA,
    "vera of a key": VERA | {"key": 7},
    "rows": {"outside": outside(token_rows=(5, 3))},
    "head": {"outside": outside(head_rows=(2,), token_rows=(5, 3))},
    "whole": {"outside": outside(whole_embedding=(), whole_head=())},
    "mixed": {
        "settings": ("use_dora",),
        "outside": outside(token_rows=(9,), whole_head=()),
    },
}
JOBS = {
    "nothing": {},
    "rank and alpha": {"rank": 2, "lora_alpha": 4.0},  # the scaling of most folders
    "alpha": {"lora_alpha": 1.0},
    "patterns": {"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"o_proj": 3.0}},
    "rslora": {"use_rslora": True},
    "targets": {"target_modules": ["q_proj"], "rank": 16},
    "layers": {"layers_to_transform": [1]},
    "excluded": {"exclude_modules": ["up_proj"]},
    "dora": {"use_dora": True, "lora_plus_ratio": 4.0},
    "vera": {"use_vera": True, "projection_prng_key": 3, "rank": 8},
    "rows": {"trainable_token_indices": [5]},
    "head": {"trainable_token_indices": {"lm_head": [5], "embed_tokens": [1]}},
    "whole": {"modules_to_save": ["embed_tokens"]},
    "mixed": {"modules_to_save": ["lm_head"], "trainable_token_indices": [1]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    for name, options in FOLDERS.items():
        export_peft(
            adapter(**options), place / name, base_model="b", linear_names=list(SHAPES)
        )
    return place


def job_of(folder, settings) -> LoraJob:
    return LoraJob(name="x", data={"path": "x"}, init_from=str(folder), **settings)


def cured(message: str, settings: dict) -> dict:
    """The settings after what the message says was done."""
    out = dict(settings)
    _, _, cures = message.partition("To start from it, ")
    assert cures.endswith("."), message
    for cure in cures.removesuffix(".").split("; "):
        if found := re.fullmatch(r"set (\w+): (.*)", cure):
            out[found[1]] = yaml.safe_load(found[2])
        else:
            for name in cure.removeprefix("leave out ").split(", "):
                assert out.pop(name, None) is not None or name in settings, message
    return out


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_cure_works(folders, folder, kind):
    settings = JOBS[kind]
    try:
        found = choose_modules(job_of(folders / folder, settings), UNTIED)
    except ConfigError as error:
        settings = cured(str(error), settings)
        assert settings != JOBS[kind]
        found = choose_modules(job_of(folders / folder, settings), UNTIED)
    assert found.start is not None
    assert found.modules.keys() == adapter(**FOLDERS[folder]).modules.keys()


def test_what_no_job_can_start_from(folders):
    """The cure is then another one, whatever the job states."""
    for model, folder, settings in (
        (TIED, "mixed", {}),
        (TIED, "mixed", JOBS["mixed"]),
        (UNTIED, "whole", {"objective": "reward"}),
    ):
        with pytest.raises(ConfigError, match=r"cannot start from.*\(jaxlora merge\)"):
            choose_modules(job_of(folders / folder, settings), model)


def test_the_settings_of_the_folder_may_be_stated(folders):
    same = {"rank": 4, "lora_alpha": 8.0, "target_modules": ["o_proj", "q_proj"]}
    for settings in (same, {"lora_alpha": 8.0}, {"rank": 4}):
        assert choose_modules(job_of(folders / "lora", settings), UNTIED).start
