"""The experts that tokens choose on a mesh, and how many choose others elsewhere.

A token takes the experts with the largest logits, so rounding changes a choice where
two logits are almost equal. On another mesh, sums round otherwise.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxlora.models.blocks.experts import CHOSEN
from jaxlora.models.forward import SlotKeys
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.profile.training import Training
from jaxlora.train.execute.stage_passes import StagePasses

Choices = list[np.ndarray]  # of each layer with experts, T k, in ascending order


def chosen_experts(training: Training, packed: PackedBatch) -> Choices:
    """Returns the experts of each token in each layer that has experts.

    Args:
        training: The run; the slots' adapters take part.
        packed: A microbatch for each lane.
    """
    found: Choices = []
    h: tuple[Any, ...] = ()
    keys = SlotKeys(baseline=training.keys.baseline)
    for number, stage in enumerate(training.layout.stages):
        spec = stage.spec.with_remat("none")  # so that nothing is in another jaxpr
        run = with_chosen(StagePasses(spec, stage.placement).evaluate)
        arguments = dataclasses.replace(stage.steps.arguments, spec=spec)
        hidden = ("hidden",) if h else ()
        takes = "base", "params", "settings", "batch", "keys", *hidden
        gives = "losses" if spec.has_head else "hidden", "batch"
        batch = training.place(packed, number)
        *inputs, _ = training.inputs(number, batch)
        out, own = arguments.program("routes", run, takes, gives)(*inputs, keys, *h)
        found += [np.sort(np.asarray(one), axis=-1) for one in own]
        if not spec.has_head:
            h = (training.place(out, number + 1),)
    return found


def num_changed(one: Choices, other: Choices, is_token: np.ndarray) -> list[int]:
    """Returns how many tokens have another expert in each layer.

    Args:
        one: The choices.
        other: Those of the same tokens elsewhere.
        is_token: Which rows are tokens, rather than padding.
    """
    pairs = zip(one, other, strict=True)
    return [int(((a != b).any(-1) & is_token).sum()) for a, b in pairs]


def with_chosen(run: Callable[..., Any]) -> Callable[..., tuple[Any, list[jax.Array]]]:
    """Makes a function return, besides, the experts that its layers have chosen."""

    def traced(*args: Any) -> tuple[Any, list[jax.Array]]:
        closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
        found: list[jax.Array] = []
        out = _evaluated(closed, jax.tree.leaves(args), found)
        return jax.tree.unflatten(jax.tree.structure(shape), out), found

    return traced


def _evaluated(
    closed: core.ClosedJaxpr, args: Sequence[Any], found: list[jax.Array]
) -> list[Any]:
    """Evaluates a jaxpr, and collects the experts that are chosen in it, in order."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs, params = list(map(read, eqn.invars)), eqn.params
        inner = params.get("call_jaxpr", params.get("jaxpr"))
        if isinstance(inner, core.ClosedJaxpr) and CHOSEN in str(inner):
            out = _evaluated(inner, inputs, found)
        else:
            options = eqn.primitive.get_bind_params(params)
            out = eqn.primitive.bind(*inputs, **options)
            out = out if eqn.primitive.multiple_results else [out]
        if eqn.primitive.name == "name" and params["name"] == CHOSEN:
            found += out
        values |= dict(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))
