"""Jobs of one run have different optimizers, each as if it were alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxlora import FrozenModel, LoraJob, RunConfig, Trainer
from jaxlora.adapters.optimizer import (
    OptimizerInputs,
    Pending,
    optimizer_step,
)
from jaxlora.adapters.optimizers.table import ADAMW, LION, find_optimizer
from jaxlora.adapters.slot_state import zero_state
from jaxlora.config import DataConfig
from jaxlora.errors import ConfigError
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan.memory.footprint import StageUse, stage_resident
from jaxlora.train.saved.export import export_checkpoint
from jaxlora.train.saved.read_checkpoint import read_newest
from tests import tiny
from tests.jaxlora.train.at_window import InterruptAt
from tests.jaxlora.train.conftest import LINEARS
from tests.jaxlora.train.test_contracts import assert_same_training

NAMES = ("layer.lora_a", "layer.lora_b")
SHAPES = {NAMES[0]: (2, 5, 3), NAMES[1]: (2, 3, 4)}
# The slots: their optimizer, decay, largest norm, and ratio of the rates of B and A.
SLOTS = (("lion", 0.1, np.inf, 1.0), ("adamw", 0.2, 1.0, 4.0), ("lion", 0.0, 0.5, 2.0))
RATE, STEP = 0.01, jax.jit(optimizer_step)


def inputs(count: int, optimizers: tuple[str, ...], step_mask) -> OptimizerInputs:
    names, decays, norms, ratios = zip(*SLOTS, strict=True)

    def row(values) -> np.ndarray:
        return np.array(values, np.float32)

    every = {
        "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
        "lion": {"b1": 0.8, "b2": 0.9},
    }
    return OptimizerInputs(
        step_mask=np.array(step_mask),
        count=np.full(3, count, np.int32),
        learning_rate=row([RATE] * 3),
        rate_ratio={"lora_b": row(ratios)},
        weight_decay=row(decays),
        settings={
            name: {key: row([value] * 3) for key, value in every[name].items()}
            for name in optimizers
        },
        optimizer=np.array(
            [optimizers.index(n) if n in optimizers else 0 for n in names], np.int32
        ),
        max_norm=row(norms),
    )


def trained(optimizers=("adamw", "lion"), step_mask=(True, True, True), steps=5):
    """The state of three slots after steps with random gradients."""
    rng = np.random.default_rng(0)
    shapes = {
        name: jax.ShapeDtypeStruct((3, *shape), jnp.float32)
        for name, shape in SHAPES.items()
    }
    state = zero_state(shapes, 3, optimizers=optimizers)
    params = {
        n: jnp.array(rng.normal(size=s.shape), s.dtype) for n, s in shapes.items()
    }
    state = dataclasses.replace(state, params=params)
    history = [params]
    for count in range(steps):
        gradients = {
            n: jnp.array(rng.normal(size=s.shape), s.dtype) for n, s in shapes.items()
        }
        history.append(gradients)
        pending = Pending(gradients=gradients, is_finite=jnp.ones(3, bool))
        state = dataclasses.replace(state, pending=pending)
        state, _ = STEP(state, inputs(count, optimizers, step_mask))
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


def test_lion_is_the_definition():
    """Algorithm 2 of arXiv 2302.06675."""
    state, (params, *gradients) = trained()
    for path in NAMES:
        weight = np.asarray(params[path][0], np.float64)
        mu = np.zeros_like(weight)
        for gradient in gradients:
            g = np.asarray(gradient[path][0], np.float64)
            weight -= RATE * (np.sign(0.8 * mu + 0.2 * g) + 0.1 * weight)
            mu = 0.9 * mu + 0.1 * g
        np.testing.assert_allclose(state.params[path][0], weight, rtol=1e-5)


@pytest.mark.parametrize(("alone", "slots"), [("adamw", [1]), ("lion", [0, 2])])
def test_an_optimizer_changes_no_bit_of_a_slot_with_another(alone, slots):
    together, _ = trained()
    state, _ = trained((alone,))
    for slot, path in itertools.product(slots, NAMES):
        np.testing.assert_array_equal(
            state.params[path][slot], together.params[path][slot]
        )
        for tensor, tables in state.optimizer_state.items():
            found = together.optimizer_state[tensor][path][slot]
            np.testing.assert_array_equal(tables[path][slot], found)


def test_a_slot_that_does_not_step_stays_as_it_is():
    state, (params, *_) = trained(step_mask=(False, True, True), steps=1)
    for path in NAMES:
        np.testing.assert_array_equal(state.params[path][0], params[path][0])
        assert not state.optimizer_state["mu"][path][0].any()
        assert state.optimizer_state["mu"][path][2].any()


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


@pytest.mark.usefixtures("compiled_when_called")
def test_a_job_that_joins_needs_an_optimizer_of_the_run(jobs, model, tmp_path):
    own = {"model": str(model.folder), "output_dir": str(tmp_path / "run")}
    slots = {"slot_rank": 8, "slot_targets": LINEARS}
    trainer = Trainer(RunConfig(jobs=jobs[:1], **own, **slots), model)
    with pytest.raises(ConfigError, match=r"optimizer lion.* made for adamw"):
        trainer.add_job(lion(jobs[1]))


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


@pytest.fixture
def train_on(jobs, tmp_path_factory):
    """Trains four jobs; returns the adapters, by job."""
    names = ("adafactor", "muon", "lion", "schedule_free_adamw")
    run = [
        jobs[i % 3].replace(
            name=name,
            optimizer=name,
            steps=4,
            lr_schedule="constant",
            target_modules=("down_proj",),
            **{"adam_eps": 1e-5} if "adam" in name else {},
        )
        for i, name in enumerate(names)
    ]

    def train(
        base: FrozenModel, mesh: str, *, stop: bool = False
    ) -> dict[str, dict[str, np.ndarray]]:
        folder = tmp_path_factory.mktemp("run")
        config = RunConfig(
            model=str(base.folder),
            output_dir=str(folder),
            jobs=run,
            max_concurrent_jobs=4,
            window_steps=1,
            microbatch_tokens=256,
            block_tokens=16,
            checkpoint_every=1,
            mesh=mesh,
        )
        if stop:
            assert Trainer(config).train(callbacks=[InterruptAt(1)]).interrupted
            check_exports(folder)
        Trainer(config).train(resume=stop)
        found = (folder / "adapters").rglob("*.safetensors")
        return {p.parent.name: safetensors.numpy.load_file(p) for p in found}

    return train


def test_a_resumed_run_ends_in_the_same_bits(train_on, model):
    """The state of each optimizer is saved and restored beside others."""
    one, twice = train_on(model, "data=1"), train_on(model, "data=1", stop=True)
    assert len(one) == 4
    jax.tree.map(np.testing.assert_array_equal, one, twice)


@pytest.mark.grid  # `test_dora.py` has two of the optimizers on a mesh, `adamw` too
@pytest.mark.needs_devices(4)
def test_a_run_resumed_on_a_mesh_equals_one_device(train_on, two_layers):
    """The state of each optimizer is sharded beside others."""
    one = train_on(two_layers, "stage=1")
    other = train_on(two_layers, "data=2,stage=2", stop=True)
    # A mesh adds the same numbers in another order. Lion takes signs of sums, and a
    # moment between two codes of 8 bits may become either.
    for name, tensors in one.items():
        same = [
            np.isclose(a, other[name][path], rtol=1e-4, atol=1e-6).mean()
            for path, a in tensors.items()
        ]
        assert np.mean(same) > 0.99, name


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
    spec = DecoderSpec(
        config=model_config(tiny.CONFIG),
        options=DecoderOptions(dtype=jnp.dtype(jnp.float32), max_segment_tokens=16),
        slots=SlotShape(num_slots=2, rank=4, optimizers=optimizers),
        adapted=("layers.0.self_attn.q_proj",),
    )
    use = StageUse(num_shards=1, num_parts=1, num_kept=1, num_waiting=0)
    found = stage_resident(spec, use)
    weights = 4 * 2 * (32 * 4 + 4 * 32)
    assert found.adapter_bytes == 2 * (weights + state_bytes)
    assert found.total_bytes(0) - found.resident_bytes == weights + 2 * state_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "nonsense"}, "optimizer='nonsense' must be one of adamw, "),
        ({"optimizer": "lion", "optimizer_args": {"b3": 0.5}}, "'b3' is no setting of"),
        ({"optimizer_args": {"b1": 0.5}}, "of adamw, where it is adam_b1"),
        (
            {"optimizer": "lion", "optimizer_args": {"b1": 1.0}},
            "at least 0 and below 1",
        ),
        ({"optimizer": "lion", "adam_b2": 0.5}, "and set b2 in optimizer_args"),
        ({"optimizer": "adamw_torch"}, "Set `optimizer: adamw`"),
        ({"optimizer": "lion", "adam_eps": 0.5}, "Leave it out"),
        ({"optimizer": "paged_adamw_8bit"}, "Set `optimizer: adamw`"),
        (
            {"optimizer": "muon", "init_lora_weights": "pissa"},
            "muon would take both for one matrix",
        ),
        (
            {"optimizer": "schedule_free_adamw"},
            "lr_schedule='cosine', and optimizer schedule_free_adamw .* constant`",
        ),
        (
            {"optimizer": "schedule_free_adamw", "adam_b1": 0.0},
            "adam_b1=0 must be above 0 and below 1",
        ),
    ],
)
def test_settings_that_no_optimizer_has(settings, message):
    job = LoraJob(name="a", data=DataConfig(path="x"), **settings)
    with pytest.raises(ConfigError, match=message):
        find_optimizer(job)


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
