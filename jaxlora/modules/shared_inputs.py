"""Inputs of kernels that all linears of a model share, computed once."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt

from jaxlora.modules.expert_linear import ExpertLinear
from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.routing import Place, Routing, live_scaling
from jaxlora.pallas_kernels import (
    MaskWords,
    dropout_keys,
    kernel_settings,
    mask_words,
)
from jaxlora.sharding.tensor import first_index


def with_shared_inputs(
    linears: Mapping[Place, MultiLoraLinear | ExpertLinear], routing: Routing
) -> Routing:
    """Adds to the routing the inputs that the kernels of all linears can share.

    Otherwise each linear would compute its own in small XLA kernels. A decoder would
    have hundreds of these, which take XLA longer to compile than everything else; in
    plain JAX, the random words would be a third of the program.

    Args:
        linears: The linears of a decoder, by layer and projection.
        routing: Slot of each row, and the keys of dropout masks.
    """
    found = {place: one for place, one in linears.items() if one.slots is not None}
    if not found:
        return routing
    adapted = found.values()
    drops = routing.token_index is not None
    rank = jnp.stack([linear.rank[...] for linear in adapted])
    scaling = jnp.stack([linear.scaling[...] for linear in adapted])
    settings = kernel_settings(
        live_scaling(scaling, rank),
        rank,
        jnp.stack([linear.dropout[...] for linear in adapted]) if drops else None,
    )
    return dataclasses.replace(
        routing,
        settings=dict(zip(found, settings, strict=True)),
        words=_mask_words(
            {p: x for p, x in found.items() if isinstance(x, MultiLoraLinear)}, routing
        ),
        keys=_expert_keys(
            [place for place, x in found.items() if isinstance(x, ExpertLinear)],
            routing,
        ),
    )


def _expert_keys(
    places: Sequence[Place], routing: Routing
) -> dict[Place, UInt[Array, "G 2"]]:
    """Computes the keys of the dropout masks of experts, by place."""
    if routing.token_index is None or not places:
        return {}
    return dict(zip(places, _keys(places, routing), strict=True))


def _keys(places: Sequence[Place], routing: Routing) -> UInt[Array, "P G 2"]:
    """Computes the words of the slots that key the masks at some places."""
    layers, projections = np.array(places, np.int32).T[:, :, None]
    if routing.first_layer is not None:
        layers = layers + routing.first_layer
    return dropout_keys(*routing.seed_and_step(), layers, projections)


def _mask_words(
    linears: Mapping[Place, MultiLoraLinear], routing: Routing
) -> dict[Place, MaskWords]:
    """Computes the words of the dropout masks, by place."""
    token_index = routing.token_index
    if token_index is None:
        return {}
    places: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for place, linear in linears.items():
        places[linear.in_features, linear.input_parts].append(place)
    words = {}
    for (num_features, parts), some in places.items():
        made = mask_words(
            _keys(some, routing),
            routing.block_adapter,
            token_index,
            num_features,
            first_feature=first_index(num_features, parts),
        )
        words |= zip(some, made, strict=True)
    return words
