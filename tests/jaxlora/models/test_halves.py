"""Two microbatches side by side compute what they compute one after the other."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxlora.adapters.exchange import exchange_rounds
from jaxlora.adapters.stage_sharding import ONE_DEVICE
from jaxlora.data.pack import PackedBatch
from jaxlora.train.execute.step import CompiledSteps
from tests.jaxlora.models.test_tensor_parallel import (
    BIASES_AND_VERA,
    EACH_KIND,
    ROUNDING,
    ROWS,
    SLOTS,
    arguments,
    batch,
    make_spec,
    placement_of,
)
from tests.oracle import relative_error

pytestmark = pytest.mark.needs_devices(4)


def other() -> PackedBatch:
    """A microbatch of other tokens and slots, whose samples have the same bounds."""
    rng, first = np.random.default_rng(7), batch()
    return dataclasses.replace(
        first,
        token_ids=rng.permutation(first.token_ids),
        labels=rng.permutation(first.labels),
        token_index=first.token_index + np.int32(48),
        block_adapter=np.array([1, 1, 0, -1, -1, 0], np.int32),
    )


def both() -> PackedBatch:
    """The two microbatches, as a device gets them."""
    return jax.tree.map(lambda *x: np.concatenate(x), batch(), other())


def step_of(spec, mesh: str | None, change=lambda params: params):
    """Returns losses, finite slots, gradients and norms of both microbatches.

    Without a mesh, one device runs one after the other.
    """
    placement, batches = ONE_DEVICE, [batch(), other()]
    if mesh is not None:
        placement = dataclasses.replace(placement_of(mesh), lanes_per_device=2)
        spec = spec.divided(tensor=placement.num_tensor, lanes=2)
        batches = [both()]
    steps = CompiledSteps(spec, placement)
    base, params, pending, settings, _, keys = arguments(spec, placement, steps)
    params = change(params)
    losses, finite = np.zeros(SLOTS), np.ones(SLOTS, bool)
    for one in batches:
        inputs = base, params, pending, settings, one, keys
        pending, out, _ = steps.accumulate(*inputs)
        losses = losses + np.asarray(out.loss).ravel()
        finite &= np.asarray(out.is_finite).ravel()
    for slot in exchange_rounds(range(SLOTS), SLOTS, placement):
        pending = steps.exchange(pending, slot)
    norms = np.asarray(steps.measure(pending).squares)
    gradients = jax.tree.map(np.asarray, pending.gradients)
    if mesh is not None:
        gradients = {name: x[0] for name, x in gradients.items()}
    return losses, finite, gradients, norms


SPECS = {
    "biases": {},
    "tied": {"layers": 1, "tied": True, "shape": (("num_token_rows", 3),)},
    "vera": {
        "layers": 1,
        "adapted": EACH_KIND,
        "shape": tuple((BIASES_AND_VERA | ROWS).items()),
    },
}


def spec_of(name: str, **options):
    shape = dict(SPECS[name].get("shape", ())) | {"use_dropout": True}
    return make_spec(**SPECS[name] | {"shape": tuple(shape.items())}, **options)


@functools.cache
def wanted(name: str):
    return step_of(spec_of(name), None)


@pytest.mark.parametrize(
    ("name", "mesh", "remat"),
    [
        ("biases", "tensor=2", "none"),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in (
                ("tied", "tensor=4", "elementwise"),
                ("biases", "tensor=2", "elementwise"),
                ("biases", "tensor=2", "mlp"),
                ("biases", "tensor=2", "layer"),
                ("biases", "tensor=4", "none"),
                ("vera", "tensor=4", "none"),
            )
        ),
    ],
)
def test_losses_gradients_and_norms_are_those_of_one_device(name, mesh, remat):
    losses, _, gradients, norms = wanted(name)
    found, _, own, squares = step_of(spec_of(name, remat=remat), mesh)
    assert relative_error(found, losses) < ROUNDING
    for key, gradient in gradients.items():
        assert relative_error(own[key], gradient) < ROUNDING, key
    assert relative_error(squares, norms) < ROUNDING


def test_what_is_not_finite_stays_in_its_slot():
    """Slot 1 has rows in both microbatches, beside those of others."""

    def diverged(params):
        name = next(n for n in params if n.endswith("lora_a"))
        return params | {name: params[name].at[1].set(np.nan)}

    losses, _, gradients, _ = wanted("biases")
    found, finite, own, _ = step_of(spec_of("biases"), "tensor=2", diverged)
    assert finite.tolist() == [True, False, True]
    others = [0, 2]
    assert relative_error(found[others], losses[others]) < ROUNDING
    for key, gradient in gradients.items():
        assert relative_error(own[key][others], gradient[others]) < ROUNDING, key
