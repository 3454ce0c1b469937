"""Jobs of all kinds on the experts of a model, beside each other."""

import json
import pathlib

import numpy as np
import pytest

from jaxlora import LoraJob, Sweep, Trainer
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.errors import ConfigError
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.models.config import is_of_expert
from jaxlora.models.structure import linear_shapes
from tests import tiny
from tests.jaxlora.train.runs import outcome, run_of, write_base
from tests.jaxlora.train.test_contracts import assert_same_training
from tests.jaxlora.train.test_preferences import assert_same_score, preference_jobs

__all__ = ["preference_jobs"]  # a fixture of another file
CONFIG = pathlib.Path(__file__).parents[2] / "golden/models/qwen3_moe/config.json"
EXPERTS = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
# There is a job of each other kind; DoRA and VeRA are defined on linears of attention.
CHANGES = {
    "dpo": {"optimizer": "lion", "learning_rate": 1e-3},
    "kto": {"expert_rank": "full"},
    "simpo": {"dropout": 0.2, "expert_rank": 3},
    "reward": {},
}
SHAPE = {"microbatch_tokens": 512, "slot_rank": 8, "checkpoint_every": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> FrozenModel:
    """A layer whose experts are chosen by most tokens, two of three."""
    own = {"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 2}
    config = json.loads(CONFIG.read_text()) | own
    config["vocab_size"] = tiny.CONFIG["vocab_size"]
    folder = tmp_path_factory.mktemp("base") / "qwen3_moe"
    return load_model(write_base(folder, config), dtype="float32")


@pytest.fixture(scope="module")
def mixed(jobs, preference_jobs):
    """A job of each kind."""
    few = {"steps": 2, "eval_every": None, "eval_fraction": 0.0}
    some = [
        preference_jobs[n].replace(**few, **EXPERTS, **x) for n, x in CHANGES.items()
    ]
    both = r".*(q_proj|experts\.\d\.down_proj)"
    next_token = jobs[2].replace(target_modules=both, **few)
    dora = jobs[0].replace(name="dora", use_dora=True, dropout=0.0, **few)
    own = {"use_vera": True, "rank": 8, "target_modules": ["q_proj"]}
    vera = LoraJob(name="vera", data=jobs[0].data, **own, **few)
    return [*some, next_token, dora, vera]


def test_all_kinds_train_together(model, mixed, tmp_path):
    found = outcome(run_of(model, tmp_path / "run", mixed, **SHAPE), model)
    assert {p.status for p in found.progress.values()} == {"finished"}
    shapes = linear_shapes(model.config)
    for job in mixed:
        assert np.isfinite(found.losses[job.name]).all()
        folder = found.folder / "adapters" / job.name
        score = shapes["model.layers.0.self_attn.q_proj"][0]
        kind = {"score_size": score} if job.objective == "reward" else {}
        adapter = import_peft(folder, shapes, **kind)
        on_experts = {is_of_expert(name) for name in adapter.modules}
        kinds = {"job2": {True, False}, "dora": {False}, "vera": {False}}
        assert on_experts == kinds.get(job.name, {True})
        # The head of a reward model starts at zero, so its experts learn a step later.
        if True in on_experts and job.objective != "reward":
            own = (x for name, x in adapter.modules.items() if is_of_expert(name))
            assert all(weights.b.any() for weights in own), job.name


@pytest.mark.parametrize("number", [-1, -2])
def test_kinds_that_experts_do_not_take_are_refused(model, mixed, tmp_path, number):
    job = mixed[number].replace(target_modules=r".*experts.*")
    config = run_of(model, tmp_path / "run", [job], **SHAPE)
    with pytest.raises(ConfigError, match=f"use_{job.name}=True .* take LoRA only"):
        Trainer(config, model)


def test_folders_that_nobody_could_read_are_refused(jobs, tmp_path):
    """Before anything is trained."""
    config = json.loads((CONFIG.parents[1] / "gpt_oss" / "config.json").read_text())
    config["vocab_size"] = tiny.CONFIG["vocab_size"]
    model = load_model(write_base(tmp_path / "base", config), dtype="float32")
    own = {**SHAPE, "expert_layout": "per_expert"}
    with pytest.raises(ConfigError, match="no other program reads LoRA on single exp"):
        Trainer(run_of(model, tmp_path / "run", jobs[:1], **own), model)


def test_a_sweep_over_the_ranks_of_experts(model, jobs, tmp_path):
    job = jobs[1].replace(steps=2, eval_every=1, **EXPERTS)
    swept = Sweep(parameters={"expert_rank": ["scaled", "full"], "rank": [4, 6]})
    config = run_of(model, tmp_path / "run", [job], sweep=swept, **SHAPE)
    found = outcome(config, model)
    assert {p.status for p in found.progress.values()} == {"finished", "stopped early"}
    shapes, ranks = linear_shapes(model.config), []
    for job in config.jobs:
        modules = import_peft(found.folder / "adapters" / job.name, shapes).modules
        ranks.append({weights.rank for weights in modules.values()})
    assert ranks == [{2}, {3}, {4}, {6}]


@pytest.mark.grid
def test_each_kind_trains_as_if_it_were_alone(model, mixed, tmp_path):
    own = {**SHAPE, "max_concurrent_jobs": len(mixed)}
    together = outcome(run_of(model, tmp_path / "run", mixed, **own), model)
    for job in mixed:
        alone = outcome(run_of(model, tmp_path / job.name, [job], **own), model)
        assert_same_training(together, alone, [job.name])
        if job.name == "reward":
            assert_same_score(together, alone)
