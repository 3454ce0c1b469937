"""Adapters of each kind that objectives may compare with, as PEFT folders."""

import dataclasses
import pathlib

import numpy as np

from jaxlora import LoraJob
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.fresh import fresh_adapter, fresh_outside
from jaxlora.hf.load import FrozenModel
from jaxlora.models.slot_modules import asked_modules
from jaxlora.models.structure import linear_names, linear_path
from jaxlora.objectives.table import find_objective
from jaxlora.plan.job.chosen_modules import choose_modules

# Ranks and linears differ from those of the jobs that compare with them.
KINDS = {
    "lora": {"rank": 3, "target_modules": ["q_proj", "up_proj"], "lora_alpha": 9.0},
    "dora": {
        "rank": 2,
        "target_modules": ["v_proj", "down_proj"],
        "use_dora": True,
        "trainable_token_indices": [65, 98, 101],
    },
    "vera": {"rank": 6, "target_modules": ["q_proj", "v_proj"], "use_vera": True},
}


def write_reference(folder: pathlib.Path, model: FrozenModel, kind: str) -> str:
    """Writes a random adapter of a kind; returns its path."""
    job = LoraJob(name=kind, data={"path": "none.jsonl"}, **KINDS[kind])
    modules = choose_modules(job, model.config).modules
    kernels = {n: model.params[f"{linear_path(n)}.kernel"] for n in modules}
    adapter = fresh_adapter(job, modules, kernels)
    rng = np.random.default_rng(len(kind))

    def moved(x: np.ndarray) -> np.ndarray:
        return (x + rng.normal(scale=0.1, size=x.shape)).astype(np.float32)

    modules = {
        name: dataclasses.replace(
            one, tensors={t: moved(x) for t, x in one.tensors.items()}
        )
        for name, one in adapter.modules.items()
    }
    tokens = asked_modules(job, find_objective(job.objective))
    outside = {
        name: dataclasses.replace(one, array=moved(one.array))
        for name, one in fresh_outside(job, tokens, model.config, model.params).items()
    }
    adapter = dataclasses.replace(adapter, modules=modules, outside=outside)
    names = linear_names(model.config)
    export_peft(adapter, folder, base_model="tiny", linear_names=names)
    return str(folder)
