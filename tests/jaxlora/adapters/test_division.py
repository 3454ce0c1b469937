"""A step of the optimizers on parts of tables is that on whole tables."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.division import TableDivision
from jaxlora.adapters.optimizer import (
    OptimizerInputs,
    Pending,
    optimizer_step,
)
from jaxlora.adapters.optimizers.table import OPTIMIZERS
from jaxlora.adapters.slot_state import state_specs, zero_state
from jaxlora.adapters.stage_sharding import REPLICATED, StageSharding
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes

pytestmark = pytest.mark.needs_devices(2)

# A of a linear that reads the hidden states is whole, and B of one that writes them.
SHAPES = {
    "q.lora_a": (2, 1, 6, 4),
    "q.lora_b": (2, 1, 4, 8),
    "o.lora_a": (2, 1, 8, 4),
    "o.lora_b": (2, 1, 4, 6),
}
AXES = {"q.lora_b": 3, "o.lora_a": 2}


def inputs(optimizers) -> OptimizerInputs:
    """Both slots step, with the first and the last optimizer; one is clipped."""
    row = functools.partial(np.asarray, dtype=np.float32)
    return OptimizerInputs(
        step_mask=np.array([True, True]),
        count=np.array([0, 0], np.int32),
        learning_rate=row([0.1, 0.2]),
        rate_ratio=rate_ratios(lambda ratio: row([1.0, 2.0])),
        weight_decay=row([0.0, 0.1]),
        settings={
            name: {
                key: row([one.default] * 2)
                for key, one in OPTIMIZERS[name].settings.items()
            }
            for name in optimizers
        },
        optimizer=np.array([0, len(optimizers) - 1], np.int32),
        max_norm=row([0.5, np.inf]),
    )


@pytest.mark.parametrize(
    "optimizers", [("adamw",), ("adafactor", "muon")], ids=["elements", "matrices"]
)
def test_a_step(optimizers):
    rng = np.random.default_rng(0)
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    numbers = {
        kind: {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
        for kind in ("params", "gradients")
    }
    whole = zero_state(shapes, 2, optimizers=optimizers)
    pending = Pending(gradients=numbers["gradients"], is_finite=np.ones(2, bool))
    state = dataclasses.replace(whole, params=numbers["params"], pending=pending)
    wanted, result = jax.jit(optimizer_step)(state, inputs(optimizers))

    placement = StageSharding(mesh=stage_meshes(MeshSizes(tensor=2))[0])
    division = TableDivision.of(AXES, shapes, optimizers)
    specs = state_specs(shapes, placement, optimizers, division)
    parts = {  # the sums of those that are whole are on both devices already
        n: np.stack([g] * (1 if n in AXES else 2))
        for n, g in numbers["gradients"].items()
    }
    pending = Pending(gradients=parts, is_finite=np.ones((1, 2), bool))
    slots = REPLICATED
    step = functools.partial(optimizer_step, division=division)
    run = placement.jit(step, (specs, slots), (specs, slots))
    state = dataclasses.replace(state, pending=pending)
    found, other = run(jax.tree.map(np.asarray, state), inputs(optimizers))
    np.testing.assert_allclose(other.norm, result.norm, rtol=1e-6)
    pairs = [(wanted.params, found.params)]
    pairs += [
        (own, found.optimizer_state[kind])
        for kind, own in wanted.optimizer_state.items()
    ]
    for own, theirs in pairs:
        for name, table in own.items():
            np.testing.assert_allclose(theirs[name], table, rtol=2e-5, atol=1e-6)
    assert found.params["q.lora_b"].addressable_data(0).shape == (2, 1, 4, 4)
