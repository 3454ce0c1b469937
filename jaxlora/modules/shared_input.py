"""Linears on kernels; those that share their input, such as q, k and v, in one pass."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxlora.modules.routing import LinearInput, Routing, live_scaling
from jaxlora.modules.variants.variant import Pair
from jaxlora.pallas_kernels import (
    LINEAR_RESULTS,
    DoraGain,
    Dropout,
    Projection,
    dropout_keys,
    multi_lora_linears,
)

_keep_results = jax.checkpoint_policies.save_only_these_names(LINEAR_RESULTS)


def apply_together(
    linears: Sequence[Any],
    x: Float[Array, "T K"] | LinearInput,
    routing: Routing,
) -> list[Float[Array, "T _"]]:
    """Applies linears that share x, each a `MultiLoraLinear`, and reads x only once.

    Those whose weights have different formats run one format after the other.

    Raises:
        ValueError: Linears with slots differ in `implementation`, or the routing has
            only some of the keys of the dropout masks.
    """
    adapted = [linear for linear in linears if linear.slots is not None]
    kinds = {linear.implementation for linear in adapted}
    if len(kinds) > 1:
        raise ValueError(
            f"linears that run together must share an implementation, got {kinds}."
        )
    outputs: dict[int, Array] = {}
    given = LinearInput.of(x)
    for places in _by_format(linears).values():
        made = _apply_adapted([linears[i] for i in places], given, routing)
        outputs |= zip(places, made, strict=True)
    return [
        linear.frozen(given.x, routing) if linear.slots is None else outputs[i]
        for i, linear in enumerate(linears)
    ]


def _by_format(linears: Sequence[Any]) -> dict[object, list[int]]:
    """Groups the places of linears with slots by how their weights are stored."""
    groups: dict[object, list[int]] = defaultdict(list)
    for i, linear in enumerate(linears):
        if linear.slots is not None:
            groups[jax.tree.structure(linear.weight)].append(i)
    return groups


def _apply_adapted(
    linears: Sequence[Any], given: LinearInput, routing: Routing
) -> Sequence[Float[Array, "T _"]]:
    """Applies linears with slots whose weights have one format."""

    def run(x):
        return multi_lora_linears(
            x,
            [
                lora_projection(linear, routing, _gain(linear, x, routing))
                for linear in linears
            ],
            routing.block_adapter,
            s=[given.s[linear.place] for linear in linears] if given.s else None,
            implementation=linears[0].implementation,
        )

    if any(variant.makes_matrices for variant in linears[0].slots.variants):
        # They are made again for the gradient.
        run = jax.checkpoint(run, policy=_keep_results)
    return run(given.x)


def lora_projection(
    linear: Any, routing: Routing, gain: DoraGain | None = None
) -> Projection:
    """Returns what the kernels read of a linear with slots.

    Args:
        linear: The linear.
        routing: Slot of each row, and the keys of dropout masks.
        gain: Gains of the output features.
    """
    pair: Pair | None = None
    for variant in linear.slots.variants:
        pair = variant.matrices(linear, pair)
    assert pair is not None, "no variant has matrices"
    (a, b), rank = pair, linear.table("rank")
    return Projection(
        w=linear.weight,
        a=a,
        b=b,
        scaling=live_scaling(linear.table("scaling"), rank),
        rank=rank,
        bias=linear.own_bias,
        dropout=_dropout(linear, routing),
        dora=gain,
        settings=routing.settings.get(linear.place),
    )


def _gain(linear: Any, x: Float[Array, "T K"], routing: Routing) -> DoraGain | None:
    drops = routing.token_index is not None
    gains: list[Any] = [
        variant.gain(linear, x, drops=drops) for variant in linear.slots.variants
    ]
    gains = [gain for gain in gains if gain is not None]
    assert len(gains) <= 1, "the output takes the gains of one variant"
    return gains[0] if gains else None


def _dropout(linear: Any, routing: Routing) -> Dropout | None:
    if routing.token_index is None:
        return None
    words, key = routing.words.get(linear.place), None
    if words is None:
        layer, projection = linear.place
        assert linear.input_parts == 1, "kernels do not know the first feature"
        assert layer is not None, "a decoder computes the words"
        key = dropout_keys(*routing.seed_and_step(), layer, projection)
    return Dropout(key, linear.table("dropout"), routing.token_index, words)
