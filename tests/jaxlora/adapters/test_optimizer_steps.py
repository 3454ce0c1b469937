"""Optimizers side by side: each is its definition, and no slot changes another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlora.adapters.optimizer import (
    OptimizerInputs,
    Pending,
    optimizer_step,
)
from jaxlora.adapters.optimizers.state import (
    evaluation_weights,
    own_shapes,
    state_shapes,
)
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.adapters.slot_state import write_slot, zero_state
from jaxlora.modules.trained_tensors import unpadded

# Each optimizer has a slot, of another rank than its neighbors.
NAMES = tuple(sorted(OPTIMIZERS))
RANK, K, N, LAYERS, STEPS = 4, 300, 3, 2, 4
RANKS = {name: 2 + i % 3 for i, name in enumerate(NAMES)}
DECAY, RATE, RATIO = 0.1, 0.02, 3.0
SHAPES = {"q.lora_a": (K, RANK), "q.lora_b": (RANK, N)}
EXTRA = {
    "sgd": {"momentum": 0.8, "nesterov": 1.0},
    "muon": {"momentum": 0.9},
    "adafactor": {"clip_threshold": 0.7},
}


def settings(name: str) -> dict[str, float]:
    found = {key: one.default for key, one in OPTIMIZERS[name].settings.items()}
    return found | EXTRA.get(name, {})


def own(name: str, stack: str) -> tuple[slice, ...]:
    """Index of an adapter's tensor in the table of its slot."""
    rank = RANKS[name]
    return unpadded((K, rank) if stack.endswith("a") else (rank, N))


@functools.cache
def drawn(name: str, step: int) -> dict[str, np.ndarray]:
    """The gradients of an adapter in a step, or its weights at the start: step -1."""
    rng = np.random.default_rng([NAMES.index(name), step + 1])
    found = {}
    for stack, shape in SHAPES.items():
        found[stack] = np.zeros((LAYERS, *shape), np.float32)
        place = found[stack][:, *own(name, stack)]
        place[:] = rng.normal(size=place.shape) * 10.0 ** rng.integers(-3, 2)
    return found


def inputs(slots: tuple[str, ...], step: int, mask=True) -> OptimizerInputs:
    def row(value, dtype=np.float32):
        return np.array([value(name) for name in slots], dtype)

    names = tuple(sorted(set(slots)))
    every = {
        name: {
            key: row(lambda slot, one=one, n=name: one if slot == n else 0.0)
            for key, one in settings(name).items()
        }
        for name in names
    }
    return OptimizerInputs(
        step_mask=np.broadcast_to(np.array(mask), len(slots)).copy(),
        count=row(lambda _: step, np.int32),
        learning_rate=row(lambda _: RATE * (step + 1)),
        rate_ratio={"lora_b": row(lambda _: RATIO)},
        weight_decay=row(lambda _: DECAY),
        settings=every,
        optimizer=row(names.index, np.int32),
        max_norm=row(lambda _: np.inf),
    )


@functools.cache
def programs(names: tuple[str, ...]):
    """The step and the start of slots with these optimizers."""
    step = functools.partial(optimizer_step, linears={n: (0, 1) for n in SHAPES})
    return jax.jit(step), jax.jit(functools.partial(write_slot, optimizers=names))


def begun(slots: tuple[str, ...]):
    """The state of slots whose jobs begin."""
    names = tuple(sorted(set(slots)))
    shapes = {
        name: jax.ShapeDtypeStruct((len(slots), LAYERS, *shape), jnp.float32)
        for name, shape in SHAPES.items()
    }
    state = zero_state(shapes, len(slots), optimizers=names)
    for slot, name in enumerate(slots):
        number = np.int32(names.index(name))
        rows = {"params": drawn(name, -1)}
        state = programs(names)[1](state, np.int32(slot), rows, number)
    return state


def stepped(state, slots: tuple[str, ...], step: int, mask=True, is_finite=True):
    gradients = {
        stack: jnp.stack([drawn(name, step)[stack] for name in slots])
        for stack in SHAPES
    }
    flags = jnp.broadcast_to(jnp.array(is_finite), len(slots))
    pending = Pending(gradients=gradients, is_finite=flags)
    state = dataclasses.replace(state, pending=pending)
    ranks = np.array([[RANKS[name] for name in slots]] * LAYERS, np.int32)
    run, _ = programs(tuple(sorted(set(slots))))
    return run(state, inputs(slots, step, mask), (), ranks)[0]


@functools.cache
def trained(slots: tuple[str, ...]):
    state = begun(slots)
    for step in range(STEPS):
        state = stepped(state, slots, step)
    return state


def definition(name: str, learning_rate):
    """An optimizer in optax's words, for one matrix without padding."""
    args = settings(name)
    adam = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
    decay = optax.add_decayed_weights(DECAY)
    chained = lambda *parts: optax.chain(
        *parts, decay, optax.scale_by_learning_rate(learning_rate)
    )
    dimensions = lambda params: jax.tree.map(
        lambda _: optax.contrib.MuonDimensionNumbers(), params
    )
    return {
        "adamw": lambda: optax.adamw(learning_rate, **adam, weight_decay=DECAY),
        "lion": lambda: optax.lion(learning_rate, **args, weight_decay=DECAY),
        "sgd": lambda: chained(optax.trace(0.8, nesterov=True)),
        "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(
            learning_rate, **adam, weight_decay=DECAY
        ),
        "muon": lambda: optax.contrib.muon(
            learning_rate,
            beta=0.9,
            weight_decay=DECAY,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=dimensions,
        ),
        "adafactor": lambda: chained(
            optax.scale_by_factored_rms(min_dim_size_to_factor=1),
            optax.clip_by_block_rms(args["clip_threshold"]),
        ),
    }[name]()


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_steps_as_in_optax(name):
    """At its own rank, whatever the rank of the slots, and in each layer by itself."""
    state, slot = trained(NAMES), NAMES.index(name)
    for stack, layer in ((stack, layer) for stack in SHAPES for layer in range(LAYERS)):
        index = (layer, *own(name, stack))
        weight = jnp.array(drawn(name, -1)[stack][index])
        start = definition(name, 0.0).init({"w": weight})
        kept, params = start, {"w": weight}
        for step in range(STEPS):
            rate = RATE * (step + 1) * (RATIO if stack.endswith("b") else 1)
            gradient = {"w": jnp.array(drawn(name, step)[stack][index])}
            updates, kept = definition(name, rate).update(gradient, kept, params)
            params = optax.apply_updates(params, updates)
        found = np.array(state.params[stack][slot])
        np.testing.assert_allclose(found[index], params["w"], rtol=2e-5, atol=2e-6)
        found[:, *own(name, stack)] = 0
        assert not found.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_alone_has_the_same_bits(name):
    together, alone, slot = trained(NAMES), trained((name,)), NAMES.index(name)

    def same(one, other):
        np.testing.assert_array_equal(np.asarray(one)[0], np.asarray(other)[slot])

    jax.tree.map(same, alone.params, together.params)
    for kind, stacks in alone.optimizer_state.items():
        jax.tree.map(same, stacks, together.optimizer_state[kind])
    # State tensors of other optimizers are zero here, and its own are not.
    others = together.optimizer_state.keys() - alone.optimizer_state.keys()
    for kind in others:
        assert not any(t[slot].any() for t in together.optimizer_state[kind].values())
    assert all(t[0].any() for s in alone.optimizer_state.values() for t in s.values())


def test_a_batch_that_is_not_finite_changes_no_bit():
    """Its own slot leaves the step out; others step as without it."""
    before, after = trained(NAMES), None
    for sick in (0, 3):
        flags = np.arange(len(NAMES)) != sick
        after = stepped(before, NAMES, STEPS, is_finite=flags)
        healthy = stepped(before, NAMES, STEPS)
        for kept in ("params", "optimizer_state"):
            parts = zip(
                *(
                    jax.tree.leaves(getattr(one, kept))
                    for one in (before, after, healthy)
                ),
                strict=True,
            )
            for then, now, other in parts:
                np.testing.assert_array_equal(now[sick], then[sick])
                np.testing.assert_array_equal(now[flags], other[flags])


def test_evaluations_have_the_average_of_schedule_free_training():
    """x of arXiv 2405.15682: the average of z, weighted by squares of the rate."""
    name = "schedule_free_adamw"
    state, slot = trained(NAMES), NAMES.index(name)
    numbers = np.arange(len(NAMES), dtype=np.int32)
    found = jax.jit(functools.partial(evaluation_weights, optimizers=NAMES))(
        state.params, state.optimizer_state, numbers
    )
    start = begun(NAMES)
    for stack, weights in found.items():
        others = np.arange(len(NAMES)) != slot
        np.testing.assert_array_equal(weights[others], state.params[stack][others])
        # z is the sum of plain steps, so it is found again from the steps before.
        mean, total, now = np.zeros(weights.shape[1:]), 0.0, start
        for step in range(STEPS):
            now = stepped(now, NAMES, step)
            rate = (RATE * (step + 1) * (RATIO if stack.endswith("b") else 1)) ** 2
            mean += rate * np.asarray(now.optimizer_state["z"][stack][slot])
            total += rate
        np.testing.assert_allclose(weights[slot], mean / total, rtol=2e-4, atol=1e-5)
        assert not np.allclose(weights[slot], state.params[stack][slot], rtol=1e-3)


def test_state_begins_at_the_weights():
    state = begun(NAMES)
    slot = NAMES.index("schedule_free_adamw")
    for stack, weights in state.params.items():
        z = state.optimizer_state["z"][stack]
        np.testing.assert_array_equal(z[slot], weights[slot])
        assert not np.asarray(z)[np.arange(len(NAMES)) != slot].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_of_a_rank_hold_the_state_of_a_smaller_one(name):
    """Each axis of a state is the rank, or is the same for all ranks."""
    tables = {
        s: jax.ShapeDtypeStruct(shape, jnp.float32) for s, shape in SHAPES.items()
    }
    whole = state_shapes([name], tables, axes=0)
    smaller = {"q.lora_a": (K, 2), "q.lora_b": (2, N)}
    for kind, stacks in own_shapes(name, smaller).items():
        for stack, shape in stacks.items():
            sizes = zip(shape, whole[kind][stack].shape, strict=True)
            assert all(
                one == other or (one, other) == (2, RANK) for one, other in sizes
            )


def test_bytes_of_state():
    """A row and a column for Adafactor."""
    table = {"q.lora_a": jax.ShapeDtypeStruct((4096, 16), jnp.float32)}

    def num_bytes(name):
        shapes = jax.tree.leaves(state_shapes([name], table, axes=0))
        return sum(np.prod(s.shape) * s.dtype.itemsize for s in shapes) / (4096 * 16)

    assert num_bytes("adamw") == 8
    assert num_bytes("adafactor") == 4 * (4096 + 16) / (4096 * 16)
