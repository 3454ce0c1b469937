"""Runs get settings that are predicted to be as fast as those that are kept, or faster.

`choices.json` has the choices for models and machines of many kinds, with the predicted
time of the whole run. `python -m tests.jaxlora.plan.mesh.test_choices` writes it anew.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import RunConfig
from jaxlora.adapters.targets import ModuleLora
from jaxlora.costs.gpus import UNKNOWN_DEVICE, parse_machine
from jaxlora.forecast.forecast import foretell
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.registry import model_config
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh.machine import Machine, this_machine
from jaxlora.plan.mesh.predict import window_seconds
from jaxlora.plan.resolve import resolve
from scripts.bench.shapes import config_json
from tests.jaxlora.memory_formula import estimated_by_formula
from tests.jaxlora.train.test_ended_jobs import prepared

KEPT = pathlib.Path(__file__).with_name("choices.json")
_WORSE = 1.005  # a run that is predicted to take this much longer fails

# Layers of each model, on devices with as small a part of their memory.
_LAYERS, _LAYERS_OF_70B = 4, 8
_SAMPLES = {"short": (100, 900), "long": (600, 3000)}
# Model, format of its base, machine, samples and number of jobs.
KINDS = [
    ("smollm2-135m", None, "cpu", "short", 1),
    ("smollm2-135m", None, "h200", "short", 1),
    ("smollm2-135m", None, "h200", "long", 4),
    ("llama-3.2-1b", None, "cpu", "long", 2),
    ("llama-3.2-1b", None, "h100", "short", 4),
    ("llama-3.2-1b", None, "h100", "long", 1),
    ("llama-3.2-1b", None, "l40sx2", "short", 4),
    ("llama-3.1-8b", None, "h200", "short", 4),
    ("llama-3.1-8b", None, "h200", "long", 1),
    ("llama-3.1-8b", None, "h100", "long", 4),
    ("llama-3.1-8b", "nf4", "l40s", "short", 4),
    ("llama-3.1-8b", "nf4", "l40s", "long", 2),
    ("llama-3.1-8b", "fp8", "h100", "short", 2),
    ("llama-3.1-8b", "fp8", "h200", "long", 4),
    ("llama-3.1-8b", "int8", "h100", "long", 1),
    ("llama-3.1-8b", None, "h100x2", "short", 1),
    ("llama-3.1-8b", None, "h100x2", "short", 4),
    ("llama-3.1-8b", None, "h100x2", "long", 1),
    ("llama-3.1-8b", None, "h100x2", "long", 4),
    ("qwen2.5-7b", None, "l40s", "short", 1),
    ("qwen2.5-7b", None, "l40sx2", "long", 2),
    ("qwen2.5-7b", None, "l40sx4", "short", 4),
    ("qwen2.5-14b", None, "h100", "short", 2),
    ("qwen2.5-14b", None, "h100x2", "long", 4),
    ("qwen2.5-14b", "nf4", "l40sx2", "short", 4),
    ("qwen2.5-32b", None, "h100x2", "long", 1),
    ("qwen2.5-32b", "nf4", "h100", "long", 2),
    ("qwen2.5-32b", None, "h100x4", "short", 4),
    ("llama-3.1-70b", "nf4", "h100x2", "short", 2),
    ("llama-3.1-70b", None, "h200x4", "long", 1),
    ("llama-3.1-8b", None, "h200x8", "short", 1),
]


def _lengths(kind: str, seed: int) -> list[int]:
    low, high = _SAMPLES[kind]
    drawn = np.random.default_rng(seed).lognormal(np.log(2 * low), 0.6, 32)
    return np.clip(drawn, low, high).astype(int).tolist()


def choice(
    name: str, base: str | None, machine: str, samples: str, num_jobs: int
) -> dict[str, Any]:
    """Returns the choice for a run, and the predicted time of the whole run."""
    whole = model_config(config_json(name))
    layers = _LAYERS_OF_70B if name == "llama-3.1-70b" else _LAYERS
    config = model_config(config_json(name, layers))
    modules = {
        f"model.layers.{layer}.{linear}": ModuleLora(
            rank=16, lora_alpha=16.0, scaling=1.0
        )
        for layer in range(layers)
        for linear in ("self_attn.q_proj", "mlp.down_proj")
    }
    settings = dict(rank=16, batch_size=8, steps=4, max_length=_SAMPLES[samples][1])
    jobs = [
        dataclasses.replace(
            prepared(f"job{n}", _lengths(samples, n), **settings), modules=modules
        )
        for n in range(num_jobs)
    ]
    model = PlannedModel(
        config=config,
        dtype=jnp.dtype("bfloat16"),
        base_format=None if base is None else BaseFormat.named(base),
    )
    run = RunConfig(
        model="none", jobs=[job.settings for job in jobs], mesh="auto", remat="auto"
    )
    if machine == "cpu":
        memory = DeviceMemory(num_bytes=2**34, source="a test")
        here = Machine(num_devices=1, speed=UNKNOWN_DEVICE, memory=memory)
        return _choice(run, model, jobs, here)
    with planned_for(parse_machine(machine).planned(0.9)):
        here = this_machine()
        assert here.memory is not None
        part = here.memory.num_bytes * layers // whole.num_layers
        memory = dataclasses.replace(here.memory, num_bytes=part)
        return _choice(run, model, jobs, dataclasses.replace(here, memory=memory))


def _choice(run, model, jobs, here) -> dict[str, Any]:
    with estimated_by_formula():
        plan = resolve(run, model, jobs, here)
    schedule, _ = foretell(plan, jobs)
    seconds = window_seconds(plan.stages, plan.lanes, schedule, plan.rates)
    return {
        "mesh": plan.config.mesh,
        "tokens": plan.config.limits.capacity,
        "remat": plan.config.weakest_remat,
        "seconds": float(f"{seconds:.5g}"),
    }


def _label(kind) -> str:
    name, base, machine, samples, num_jobs = kind
    return f"{name} {base or 'bf16'}, {machine}, {num_jobs} x {samples}"


def _param(kind):
    takes_long = kind[2] in ("h100x4", "h200x4", "h200x8")
    marks = pytest.mark.grid if takes_long else ()
    return pytest.param(kind, id=_label(kind), marks=marks)


@pytest.mark.parametrize("kind", [_param(kind) for kind in KINDS])
def test_a_choice_is_as_fast_as_the_one_that_is_kept(kind):
    found, kept = choice(*kind), json.loads(KEPT.read_text())[_label(kind)]
    assert found["seconds"] <= _WORSE * kept["seconds"], (found, kept)


def _write() -> None:
    table = {}
    for kind in KINDS:
        table[_label(kind)] = choice(*kind)
        print(_label(kind), table[_label(kind)], file=sys.stderr)
    lines = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in table.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _write()
