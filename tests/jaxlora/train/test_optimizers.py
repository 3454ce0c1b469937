"""Jobs of one run have different optimizers, each as if it were alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxlora import LoraJob, Trainer
from jaxlora.adapters.optimizer import (
    OptimizerInputs,
    Pending,
    optimizer_step,
)
from jaxlora.adapters.optimizers.table import ADAMW, LION, find_optimizer
from jaxlora.adapters.slot_state import zero_state
from jaxlora.config import DataConfig
from jaxlora.plan.memory.footprint import stage_resident
from jaxlora.train.saved.export import export_checkpoint
from jaxlora.train.saved.read_checkpoint import read_newest
from tests.jaxlora.train.runs import ONE_STAGE, InterruptAt, outcome, run_of, tiny_spec
from tests.jaxlora.train.test_contracts import assert_same_training

NAMES = ("layer.lora_a", "layer.lora_b")
SHAPES = {NAMES[0]: (2, 5, 3), NAMES[1]: (2, 3, 4)}
# The slots: their optimizer, decay, largest norm, and ratio of the rates of B and A.
SLOTS = (("lion", 0.1, np.inf, 1.0), ("adamw", 0.2, 1.0, 4.0), ("lion", 0.0, 0.5, 2.0))
KINDS = "adamw", "lion"
RATE, STEP = 0.01, jax.jit(optimizer_step)


def inputs(count: int) -> OptimizerInputs:
    names, decays, norms, ratios = zip(*SLOTS, strict=True)

    def row(values) -> np.ndarray:
        return np.array(values, np.float32)

    every = {
        "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
        "lion": {"b1": 0.8, "b2": 0.9},
    }
    return OptimizerInputs(
        step_mask=np.ones(3, bool),
        count=np.full(3, count, np.int32),
        learning_rate=row([RATE] * 3),
        rate_ratio={"lora_b": row(ratios)},
        weight_decay=row(decays),
        settings={
            n: {k: row([v] * 3) for k, v in own.items()} for n, own in every.items()
        },
        optimizer=np.array([KINDS.index(name) for name in names], np.int32),
        max_norm=row(norms),
    )


def trained():
    """The state of three slots after five steps, their first weights and gradients."""
    rng = np.random.default_rng(0)
    shapes = {n: jax.ShapeDtypeStruct((3, *s), jnp.float32) for n, s in SHAPES.items()}

    def drawn() -> dict[str, jax.Array]:
        return {
            n: jnp.asarray(rng.normal(size=s.shape), s.dtype) for n, s in shapes.items()
        }

    state = dataclasses.replace(zero_state(shapes, 3, optimizers=KINDS), params=drawn())
    history = [state.params]
    for count in range(5):
        history.append(drawn())
        pending = Pending(gradients=history[-1], is_finite=jnp.ones(3, bool))
        state = dataclasses.replace(state, pending=pending)
        state, _ = STEP(state, inputs(count))
    return state, history


def of_slot(tables, slot: int):
    return {name: table[slot] for name, table in tables.items()}


@pytest.mark.parametrize("slot", range(3))
def test_each_slot_steps_as_in_optax(slot):
    """With decay, clipping by the norm, and another rate of B."""
    state, (params, *gradients) = trained()
    name, decay, norm, ratio = SLOTS[slot]
    own = {
        "adamw": optax.adamw(RATE, 0.9, 0.95, 1e-8, weight_decay=decay),
        "lion": optax.lion(RATE, 0.8, 0.9, weight_decay=decay),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(norm), own[name])
    weights = of_slot(params, slot)
    kept = optimizer.init(weights)
    for gradient in gradients:
        updates, kept = optimizer.update(of_slot(gradient, slot), kept, weights)
        updates[NAMES[1]] = updates[NAMES[1]] * ratio
        weights = optax.apply_updates(weights, updates)
    for path, expected in weights.items():
        np.testing.assert_allclose(state.params[path][slot], expected, rtol=2e-6)
    for tensor in ("mu", "nu") if name == "adamw" else ("mu",):
        for path, expected in optax.tree.get(kept, tensor).items():
            found = state.optimizer_state[tensor][path][slot]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)
    assert name == "adamw" or not any(
        table[slot].any() for table in state.optimizer_state["nu"].values()
    )


def lion(job: LoraJob, **changes) -> LoraJob:
    args = {"b1": 0.8, "b2": 0.95}
    return job.replace(optimizer="lion", optimizer_args=args, **changes)


def test_jobs_train_beside_another_optimizer_as_if_alone(train, jobs):
    """And a job with a known optimizer joins without a further program."""
    slots = {"slot_targets": ("down_proj",)}
    jobs = [job.replace(target_modules=slots["slot_targets"]) for job in jobs[:3]]
    first, second, third = jobs[0], lion(jobs[1]), lion(jobs[2])
    added = []

    def add(trainer):
        if not added:
            added.append(trainer.layout.num_compilations())
            trainer.add_job(third)

    together = train([first, second], max_concurrent_jobs=3, on_window=add, **slots)
    assert together.trainer.layout.num_compilations() == added[0]
    # The other job ends after its first step, and is there for the programs.
    slots["max_concurrent_jobs"] = 3
    alone = train([second, first.replace(steps=1)], **slots)
    assert_same_training(together, alone, [second.name])


def check_exports(folder) -> None:
    """Jobs that train are exported as they would be evaluated."""
    found = read_newest(folder / "checkpoints", has_tensors=True)
    assert len(found.tensors) == 4
    exported = export_checkpoint(folder, folder.with_name(f"{folder.name}-now"))
    for path in exported.folders:
        tensors = safetensors.numpy.load_file(path / "adapter_model.safetensors")
        trained, is_average = found.parked(path.name).params, "free" in path.name
        for module, weights in found.adapter(path.name).modules.items():
            given = tensors[f"base_model.model.{module}.lora_A.weight"].T
            np.testing.assert_array_equal(given, weights.a)
            in_training = trained[f"{module.removeprefix('model.')}.lora_a"]
            assert np.array_equal(given, in_training) != is_average


def test_a_resumed_run_ends_in_the_same_bits(model, jobs, tmp_path):
    """The state of each optimizer is saved and restored beside others."""
    common = {"steps": 4, "lr_schedule": "constant", "target_modules": ("down_proj",)}
    names = "adafactor", "muon", "lion", "schedule_free_adamw"
    run = [
        one.replace(name=name, optimizer=name, **common)
        for one, name in zip((*jobs[:3], jobs[0]), names, strict=True)
    ]
    run[-1] = run[-1].replace(adam_eps=1e-5)
    shape = {"max_concurrent_jobs": 4, "microbatch_tokens": 256, "block_tokens": 16}
    shape |= {"window_steps": 1, "checkpoint_every": 1}
    whole, cut = (run_of(model, tmp_path / n, run, **shape) for n in ("whole", "cut"))
    assert Trainer(cut, model).train(callbacks=[InterruptAt(1)]).interrupted
    check_exports(tmp_path / "cut")
    wanted, found = outcome(whole, model), outcome(cut, model, resume=True)
    assert len(wanted.bytes) == 4 and found.bytes == wanted.bytes


@pytest.mark.parametrize(
    ("optimizers", "state_bytes"),
    [
        (("adamw",), 2 * 4 * 256),
        (("lion",), 4 * 256),
        (("adamw", "lion"), 2 * 4 * 256),  # they share a table
        (("adafactor",), 4 * (32 + 4 + 32 + 4)),
    ],
)
def test_memory_counts_the_state_tensors_of_the_run(optimizers, state_bytes):
    """Weights, gradients and state; a checkpoint copies all but the gradients."""
    spec = tiny_spec(["layers.0.self_attn.q_proj"], optimizers=optimizers)
    found = stage_resident(spec, ONE_STAGE)
    weights = 4 * 2 * (32 * 4 + 4 * 32)
    assert found.adapter_bytes == 2 * (weights + state_bytes)
    assert found.total_bytes(0) - found.resident_bytes == weights + 2 * state_bytes


def test_settings_of_a_job():
    job = LoraJob(name="a", data=DataConfig(path="x"), adam_b2=0.95)
    assert find_optimizer(job) is ADAMW
    assert ADAMW.settings_of(job) == {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
    job = LoraJob(
        name="a",
        data=DataConfig(path="x"),
        optimizer="lion",
        optimizer_args={"b1": 0.5},
    )
    assert find_optimizer(job) is LION
    assert LION.settings_of(job) == {"b1": 0.5, "b2": 0.99}
