"""The choice of replicas after jobs have ended, by plans for GPUs that are not here."""

import dataclasses
from collections.abc import Collection, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import LoraJob, RunConfig
from jaxlora.adapters.targets import ModuleLora
from jaxlora.costs.gpus import find_speed
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.mesh import candidates
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.replicas import lists
from jaxlora.plan.resolve import resolve
from jaxlora.plan.run_plan import RunPlan
from tests.jaxlora.train.runs import data_of, samples_of
from tests.llama import LLAMA_1B

pytestmark = pytest.mark.usefixtures("memory_by_formula", "few_ways")

# Two layers, so that a mesh is weighed in milliseconds. One device holds samples of
# about 2,300 tokens.
LLAMA = dataclasses.replace(
    LLAMA_1B, num_layers=2, vocab_size=8192, layer_windows=(None,) * 2
)
MODEL = PlannedModel(config=LLAMA, dtype=jnp.dtype("bfloat16"), base_format=None)
HERE = Machine(
    num_devices=4,
    speed=find_speed("NVIDIA H100 80GB HBM3"),
    memory=DeviceMemory(num_bytes=2**29, source="a test"),
)


@pytest.fixture
def few_ways(monkeypatch):
    """Fewer ticks are packed, and fewer sizes tried."""
    monkeypatch.setattr(candidates, "_TICKS", 2)
    monkeypatch.setattr(candidates, "_SHARES", (1, 1 / 2))
    monkeypatch.setattr(lists, "_HALVINGS", 2)


def prepared(
    name: str, lengths: Sequence[int], held_out: Sequence[int] = (), **settings
) -> PreparedJob:
    """A job with samples of these lengths."""
    data = {"path": "none"}
    own = {"batch_size": 6, "steps": 400, "rank": 8}
    own |= {"max_length": max(*lengths, *held_out)}
    own |= {"eval_data": data} if held_out else {}
    job = LoraJob(name=name, data=data, **own | settings)
    modules = {
        f"model.layers.{layer}.{linear}": ModuleLora(
            rank=job.rank, lora_alpha=8.0, scaling=1.0
        )
        for layer in range(LLAMA.num_layers)
        for linear in ("self_attn.q_proj", "mlp.down_proj")
    }
    return PreparedJob(
        settings=job,
        modules=modules,
        start=None,
        train_data=data_of(samples_of(lengths), max(lengths)),
        eval_data=data_of(samples_of(held_out), max(held_out)) if held_out else None,
    )


def plan_of(
    jobs: Sequence[PreparedJob], here: Machine = HERE, ended: Collection[str] = ()
) -> RunPlan:
    """The plan of a run with `replicas: auto`, of which some jobs have ended."""
    config = RunConfig(
        model="none",
        jobs=[job.settings for job in jobs],
        replicas="auto",
        remat="layer",
        max_concurrent_jobs=4,
    )
    return resolve(config, MODEL, jobs, here, ended=ended)


def lengths(rng: np.random.Generator, most: int) -> list[int]:
    return rng.integers(50, most, rng.integers(8, 24)).tolist()


# Jobs that ask more of slots or microbatches than `others` do.
DEMANDING = [
    {"rank": 64, "use_dora": True, "dropout": 0.1},
    {"modules_to_save": ["lm_head"], "optimizer": "sgd"},
]


# test_replan.py trains such a choice.
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.grid)])
def test_the_choice_is_that_of_a_run_without_them(seed):
    """Replicas, slots and kernels."""
    rng = np.random.default_rng(seed)
    others = [
        prepared(
            f"job{i}", lengths(rng, 900), lengths(rng, 1200), batch_size=(6, 1)[seed]
        )
        for i in range(2)
    ]
    settings = {"batch_size": 4} | DEMANDING[seed]
    most = (8000, 900)[seed]
    ended = [prepared("ended", lengths(rng, most), lengths(rng, most), **settings)]
    number = int(rng.integers(3))
    jobs = [*others[:number], *ended, *others[number:]]
    # Whole copies of the head need more.
    memory = DeviceMemory(num_bytes=(5 * 2**27, 3 * 2**30)[seed], source="a test")
    here = dataclasses.replace(HERE, memory=memory)
    found, wanted = plan_of(jobs, here, ["ended"]), plan_of(others, here)
    assert found.ended == ("ended",)
    assert [j.name for j in found.config.jobs] == [job.name for job in jobs]
    for name in ("spec", "lanes", "bounds", "shapes", "rules"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.config.replace(jobs=wanted.config.jobs) == wanted.config
    # With them, it is another one.
    assert plan_of(jobs, here).spec != wanted.spec


def test_a_choice_that_could_not_hold_the_job_that_has_left():
    rng = np.random.default_rng(0)
    others = [prepared(f"job{i}", lengths(rng, 900)) for i in range(2)]
    jobs = [prepared("long", [*lengths(rng, 900), 7900]), *others]
    assert tokens(plan_of(jobs)) >= 7900
    assert tokens(plan_of(jobs, ended=["long"])) < 7900
    # A sample that is held out is held as well.
    jobs[1] = prepared("job0", lengths(rng, 900), [2500])
    assert 2500 <= tokens(plan_of(jobs, ended=["long"])) < 7900


def tokens(plan: RunPlan) -> int:
    """Tokens of the largest microbatches that are chosen."""
    return plan.config.limits.capacity
