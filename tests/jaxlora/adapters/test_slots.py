"""The state of a slot is a value: parked, and restored elsewhere, it loses nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters import slots
from jaxlora.adapters.optimizer import OptimizerInputs
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.adapters.slots import SlotTable
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios, unpadded
from jaxlora.train.execute.step import CompiledSteps
from tests import tiny

ADAMW, EVERY = ("adamw",), tuple(sorted(OPTIMIZERS))


@functools.cache
def programs(spec: DecoderSpec) -> CompiledSteps:
    return CompiledSteps(spec)


def make_table(rank: int, optimizers=ADAMW) -> SlotTable:
    spec = DecoderSpec(
        config=model_config(tiny.CONFIG),
        options=DecoderOptions(dtype=jnp.dtype(jnp.float32), max_segment_tokens=16),
        slots=SlotShape(num_slots=3, rank=rank, optimizers=optimizers),
        adapted=tuple(
            f"layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qv"
        ),
    )
    steps = programs(spec)
    return SlotTable(
        spec,
        steps.write_slot,
        read_slot=steps.read_slot,
        empty=steps.make_empty,
        evaluation_weights=steps.evaluation_weights,
    )


@pytest.fixture
def tables():
    return make_table


def train(table: SlotTable, slot: int, adapter, seed: int, steps: range) -> None:
    """Optimizer steps with gradients that depend only on the seed and the step."""
    for step in steps:
        rng = np.random.default_rng([seed, step])
        pending = jax.tree.map(np.array, table.state.pending)
        gradients = to_modules(table._spec.stacks, pending.gradients)
        for path, tensor in adapter.by_path().items():
            place = gradients[path][slot]
            place[unpadded(tensor.shape)] = rng.normal(size=tensor.shape)

        def row(value, dtype=np.float32):
            return np.array([value if i == slot else 0 for i in range(3)], dtype)

        names, own = table._spec.slots.optimizers, table._optimizers[slot]
        values = {
            name: {
                key: row(one.default) for key, one in OPTIMIZERS[name].settings.items()
            }
            for name in names
        }
        inputs = OptimizerInputs(
            step_mask=row(True, np.bool_),
            count=row(step, np.int32),
            learning_rate=row(0.01),
            rate_ratio=rate_ratios(lambda ratio: row(2.0)),
            weight_decay=row(0.1),
            settings=values,
            optimizer=row(names.index(own), np.int32),
            max_norm=row(np.inf),
        )
        state = dataclasses.replace(table.state, pending=pending)
        step = programs(table._spec).step
        table.state, _ = step(state, inputs, (), table.settings["rank"])


def park(table: SlotTable, slot: int) -> ParkedSlot:
    """Takes the state out of a slot."""
    parked = table.copy(slot)
    table.clear(slot)
    return parked


def is_equal(one: ParkedSlot, other: ParkedSlot) -> bool:
    return all(
        one.by_kind()[kind].keys() == tensors.keys()
        and all((one.by_kind()[kind][p] == tensors[p]).all() for p in tensors)
        for kind, tensors in other.by_kind().items()
    )


@pytest.fixture
def adapters(make_adapter):
    suffixes = ("q_proj", "v_proj")
    return [make_adapter(suffixes, rank=3 - i, seed=i, dropout=0.1) for i in range(2)]


@pytest.mark.parametrize(("rank", "slot"), [(4, 0), (4, 2), (6, 1)])
def test_a_parked_job_continues_with_the_same_bits(tables, adapters, rank, slot):
    """In its old slot, in another slot, and among slots of a larger rank."""
    job, other = adapters
    stayed = tables(4)
    stayed.load(0, job, "adamw")
    train(stayed, 0, job, seed=1, steps=range(4))

    left = tables(4)
    left.load(0, job, "adamw")
    train(left, 0, job, seed=1, steps=range(2))
    parked = park(left, 0)
    assert not any(
        np.asarray(table)[0].any()
        for table in jax.tree.leaves((left.state.params, left.state.optimizer_state))
    )
    left.load(0, other, "adamw")  # the slot has other tenants meanwhile
    train(left, 0, other, seed=2, steps=range(3))
    if slot == 0:
        left.clear(0)

    arrived = left if rank == 4 else tables(rank)
    arrived.restore(slot, parked, job)
    assert is_equal(arrived.copy(slot), parked)
    for name in ("rank", "scaling"):
        here, there = (table.settings[name] for table in (arrived, stayed))
        np.testing.assert_array_equal(here[:, slot], there[:, 0])
    np.testing.assert_array_equal(
        arrived.settings["dropout"][:, slot], np.float32(job.dropout)
    )
    train(arrived, slot, job, seed=1, steps=range(2, 4))
    assert is_equal(park(arrived, slot), park(stayed, 0))


def test_a_slot_that_is_cleared_has_nothing_of_its_job(tables, adapters):
    """Not even gradients of an incomplete batch, or settings; its neighbor stays."""
    table = tables(4)
    for slot, job in enumerate(adapters):
        table.load(slot, job, "adamw")
        train(table, slot, job, seed=slot, steps=range(1))
    pending = jax.tree.map(jnp.ones_like, table.state.pending)
    is_finite = pending.is_finite.at[0].set(False)
    pending = dataclasses.replace(pending, is_finite=is_finite)
    table.state = dataclasses.replace(table.state, pending=pending)
    neighbor = table.copy(1)
    table.clear(0)
    pending = table.state.pending
    for array in jax.tree.leaves((table.kept, pending.gradients)):
        assert not np.asarray(array)[0].any()
    assert np.asarray(pending.is_finite).all()
    for name in ("scaling", "dropout", "rank"):
        values = np.asarray(table.settings[name])
        assert not values[:, 0].any() and values[:, 1].any()
    assert all(np.asarray(x)[1].all() for x in pending.gradients.values())
    assert is_equal(table.copy(1), neighbor)


@pytest.mark.parametrize("name", EVERY)
def test_the_state_of_every_optimizer_moves_to_another_slot(tables, adapters, name):
    """It goes on with the same bits, and fits slots of a larger rank unchanged."""
    job, other = adapters
    stayed, left = tables(4, EVERY), tables(4, EVERY)
    for table in (stayed, left):
        table.load(0, job, name)
        train(table, 0, job, seed=1, steps=range(2))
    parked = park(left, 0)
    assert parked.optimizer == name and len(parked.by_kind()) > 1
    for optimizer in (name, "adamw"):
        left.load(2, other, optimizer)
        train(left, 2, other, seed=2, steps=range(1))
    left.restore(2, parked, job)
    train(left, 2, job, seed=1, steps=range(2, 4))
    train(stayed, 0, job, seed=1, steps=range(2, 4))
    assert is_equal(left.copy(2), stayed.copy(0))
    assert is_equal(left.snapshot()(2), left.copy(2))
    larger = tables(6, EVERY)
    larger.restore(1, parked, job)
    assert is_equal(larger.copy(1), parked)


def test_a_snapshot_of_empty_slots_copies_nothing(tables, adapters, monkeypatch):
    table = tables(4)
    table.load(1, adapters[0], "adamw")
    table.clear(1)
    monkeypatch.setattr(slots, "to_host", lambda tree: pytest.fail("copied"))
    read = table.snapshot()
    with pytest.raises(ValueError, match="slot 1 is empty"):
        read(1)


def test_an_average_is_read_and_exported(tables, adapters):
    """From a slot, from a parked state, and in an evaluation on the device."""
    job, _ = adapters
    table = tables(4, EVERY)
    table.load(1, job, "schedule_free_adamw")
    start = table.begin_reading(1, job)().by_path()
    for path, weight in job.by_path().items():
        np.testing.assert_allclose(start[path], weight, rtol=1e-6)
    train(table, 1, job, seed=1, steps=range(3))
    kinds, found = table.copy(1).by_kind(), table.begin_reading(1, job)().by_path()
    evaluated = to_modules(table._spec.stacks, table.weights)
    for path, y in kinds["params"].items():
        b1 = kinds["schedule_free_adamw.b1"][path]
        x = (y - (1 - b1) * kinds["z"][path]) / b1
        assert b1 == np.float32(0.9) and np.abs(x - y).max() > 1e-4
        np.testing.assert_array_equal(found[path], x)
        own = np.asarray(evaluated[path])[1][unpadded(x.shape)]
        np.testing.assert_allclose(own, x, rtol=1e-5, atol=1e-7)


def test_bytes_that_a_reading_queues_are_bounded(tables, adapters, monkeypatch):
    """Those of an average are also of its optimizer's state."""
    sizes, everywhere = [], slots.everywhere

    def noted(queued):
        sizes.append(sum(x.nbytes for x in queued))
        return everywhere(queued)

    monkeypatch.setattr(slots, "everywhere", noted)
    for optimizers, name in ((("adamw",), "adamw"), (EVERY, "schedule_free_adamw")):
        table = tables(4, optimizers)
        table.load(1, adapters[0], name)
        table.begin_reading(1, adapters[0])()
        assert sizes[-1] <= table.copy_bytes
    assert sizes[0] == table.row_bytes < sizes[1]


@pytest.mark.parametrize("lost", ["mu", "nu"])
def test_the_moments_matter(tables, adapters, lost):
    """A park that lost a moment would be noticed by the test above."""
    job = adapters[0]
    table = tables(4)
    table.load(0, job, "adamw")
    train(table, 0, job, seed=1, steps=range(2))
    parked = park(table, 0)
    kinds = parked.by_kind()
    kinds[lost] = {path: np.zeros_like(array) for path, array in kinds[lost].items()}
    table.restore(1, parked, job)
    table.restore(2, ParkedSlot.of(kinds), job)
    for slot in (1, 2):
        train(table, slot, job, seed=1, steps=range(2, 3))
    whole, without = (park(table, slot).params for slot in (1, 2))
    assert any((whole[path] != without[path]).any() for path in whole)


def test_states_that_do_not_fit(tables, adapters):
    job, other = adapters
    table = tables(4)
    with pytest.raises(ValueError, match="slot 1 is empty"):
        park(table, 1)
    table.load(1, job, "adamw")
    parked = park(table, 1)
    with pytest.raises(ValueError, match="slot 1 is empty"):
        table.copy(1)
    with pytest.raises(ValueError, match="the parked state has other shapes"):
        table.restore(1, parked, other)
    with pytest.raises(ValueError, match="must have the paths and shapes"):
        ParkedSlot.of(parked.by_kind() | {"nu": {}})
