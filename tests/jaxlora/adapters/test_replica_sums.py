"""Replicas hand gradients of a slot to one of them, which hands out new weights."""

import itertools

import jax
import numpy as np
import pytest

from jaxlora.adapters import exchange
from jaxlora.adapters.optimizer import Pending
from jaxlora.adapters.slot_state import read_slot_rows

add_part, read_part = jax.jit(exchange.add_part), jax.jit(exchange.read_part)
SHAPES, SLOTS = {"b": (2, 7, 3), "a": (1, 3, 5), "c": (1,)}, 3


def tables(seed: int) -> dict[str, np.ndarray]:
    """Numbers of all magnitudes, so that sums in another order have other bits."""
    rng, out = np.random.default_rng(seed), {}
    for name, shape in SHAPES.items():
        scale = 10.0 ** rng.integers(-6, 6, (SLOTS, *shape))
        numbers = rng.normal(size=(SLOTS, *shape)) * scale
        out[name] = numbers.astype(np.float32)
    return out


def pending(seed: int, finite: bool = True) -> Pending:
    return Pending(gradients=tables(seed), is_finite=np.full(SLOTS, finite))


@pytest.mark.needs_devices(4)
def test_sums_have_the_same_bits_in_any_order_of_arrival():
    """Parts come from four devices, one after the other, and are added in order."""
    devices, slot = jax.devices()[:4], np.int32(1)
    each = [jax.device_put(pending(i), d) for i, d in enumerate(devices)]
    bits = set()
    for order in itertools.permutations(range(1, 4)):
        arrived = {}
        for i in order:
            part = jax.device_put(read_part(each[i], slot), devices[0])
            arrived[i] = jax.block_until_ready(part)
        total = each[0]
        for i in sorted(arrived):
            total = add_part(total, slot, *arrived[i])
        bits.add(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(total)))
    assert len(bits) == 1
    for name in SHAPES:
        parts = [tables(i)[name] for i in range(4)]
        wanted = parts[0].copy()
        for part in parts[1:]:
            wanted[1] = wanted[1] + part[1]  # in float32, and of this slot alone
        np.testing.assert_array_equal(np.asarray(total.gradients[name]), wanted)
    assert total.gradients["a"].devices() == {devices[0]}


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_part_that_is_not_finite_is_noticed(spoiled):
    both = [pending(i, finite=i != spoiled) for i in range(2)]
    total = add_part(both[0], np.int32(2), *read_part(both[1], np.int32(2)))
    assert not total.is_finite[2]
    np.testing.assert_array_equal(total.is_finite[:2], both[0].is_finite[:2])


def test_a_replica_takes_the_weights_of_one_slot():
    weights, own, gradients = tables(5), tables(6), pending(7, finite=False)
    slot = np.int32(2)
    row = jax.jit(read_slot_rows)(weights, slot)
    new, emptied = jax.jit(exchange.write_weights)(own, gradients, slot, row)
    for name in SHAPES:
        np.testing.assert_array_equal(new[name][2], weights[name][2])
        np.testing.assert_array_equal(new[name][:2], own[name][:2])
        assert not np.asarray(emptied.gradients[name][2]).any()
        np.testing.assert_array_equal(
            emptied.gradients[name][:2], gradients.gradients[name][:2]
        )
    assert emptied.is_finite.tolist() == [False, False, True]
