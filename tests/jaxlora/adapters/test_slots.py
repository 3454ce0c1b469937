"""The state of a slot is a value: parked, and restored elsewhere, it loses nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.optimizer import OptimizerInputs, optimizer_step
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.adapters.slots import SlotTable
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_paths
from jaxlora.modules.multi_lora_linear import SlotShape
from jaxlora.modules.trained_tensors import rate_ratios, unpadded
from jaxlora.train.execute.step import CompiledSteps
from tests import tiny

STEP = jax.jit(optimizer_step)


def make_table(rank: int) -> SlotTable:
    spec = DecoderSpec(
        config=model_config(tiny.CONFIG),
        options=DecoderOptions(dtype=jnp.dtype(jnp.float32), max_segment_tokens=16),
        slots=SlotShape(num_slots=3, rank=rank),
        adapted=tuple(
            f"layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qv"
        ),
    )
    return SlotTable(spec, CompiledSteps(spec).write_slot)


@pytest.fixture(scope="module")
def tables():
    """Makes tables whose programs are compiled once."""
    made = {rank: make_table(rank) for rank in (4, 6)}
    empty = {rank: table.state for rank, table in made.items()}

    def make(rank: int) -> SlotTable:
        table = make_table(rank)
        table._write_slot = made[rank]._write_slot
        table.state = jax.tree.map(jnp.copy, empty[rank])
        return table

    return make


def train(table: SlotTable, slot: int, adapter, seed: int, steps: range) -> None:
    """Optimizer steps with gradients that depend only on the seed and the step."""
    for step in steps:
        rng = np.random.default_rng([seed, step])
        pending = jax.tree.map(np.array, table.state.pending)
        gradients = to_paths(table._spec.stacks, pending.gradients, axis=1)
        for path, tensor in adapter.by_path().items():
            place = gradients[path][slot]
            place[unpadded(tensor.shape)] = rng.normal(size=tensor.shape)

        def row(value, dtype=np.float32):
            return np.array([value if i == slot else 0 for i in range(3)], dtype)

        inputs = OptimizerInputs(
            step_mask=row(True, np.bool_),
            count=row(step, np.int32),
            learning_rate=row(0.01),
            rate_ratio=rate_ratios(lambda ratio: row(2.0)),
            weight_decay=row(0.1),
            settings={"adamw": {"b1": row(0.9), "b2": row(0.999), "eps": row(1e-8)}},
            optimizer=np.zeros(3, np.int32),
            max_norm=row(np.inf),
        )
        state = dataclasses.replace(table.state, pending=pending)
        table.state, _ = STEP(state, inputs)


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
        here, there = (getattr(table.settings, name) for table in (arrived, stayed))
        np.testing.assert_array_equal(here[:, slot], there[:, 0])
    np.testing.assert_array_equal(
        arrived.settings.dropout[:, slot], np.float32(job.dropout)
    )
    train(arrived, slot, job, seed=1, steps=range(2, 4))
    assert is_equal(park(arrived, slot), park(stayed, 0))


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
    with pytest.raises(ValueError, match="same paths and shapes"):
        ParkedSlot.of(parked.by_kind() | {"nu": {}})
