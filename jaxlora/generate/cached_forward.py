"""The forward pass over new tokens, with the keys and values of those before cached."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.generate.cached_attention import LayerCache, cached_attention
from jaxlora.models.decoder import Decoder
from jaxlora.models.layer import DecoderLayer
from jaxlora.modules.attention import LayerRopes, layer_ropes
from jaxlora.modules.loss import head_logits
from jaxlora.modules.multi_lora_linear import Routing


def next_logits(
    decoder: Decoder,
    cache: tuple[LayerCache, ...],
    token_ids: Int[Array, "B S"],
    place: Int[Array, ""],
    starts: Int[Array, " B"],
    slots: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[LayerCache, ...]]:
    """Runs S tokens of each sequence, and returns the logits of the token after them.

    The rows of a sequence are one token block, so each sequence has its own adapter.

    Args:
        decoder: The whole decoder, with weights that are not divided among devices.
        cache: Keys and values of the tokens before, for each layer.
        token_ids: The new tokens.
        place: Place in the cache of the first new token, the same for all sequences.
        starts: Place in the cache of each sequence's first token.
        slots: Slot of each sequence's adapter; without slots, any number from 0.
    """
    num_rows, num_new = token_ids.shape
    positions = place + jnp.arange(num_new) - starts[:, None]
    ropes = layer_ropes(decoder.config, jnp.maximum(positions, 0).reshape(-1))
    routing = Routing(block_adapter=slots)
    h = before = decoder.embed(token_ids.reshape(-1))
    updated = []
    for number, layer_cache in enumerate(cache):
        layer, before = decoder.layers[str(number)], h
        h, layer_cache = _run_layer(
            layer, h, layer_cache, ropes, routing, place, starts
        )
        updated.append(layer_cache)
    last = decoder.final_norm(h.reshape(num_rows, num_new, -1)[:, -1])
    head, transposed = decoder.stored_head(before)
    logits = head_logits(
        last,
        head,
        head_transposed=transposed,
        logit_softcap=decoder.config.logit_softcap,
    )
    return logits, tuple(updated)


def _run_layer(
    layer: DecoderLayer,
    h: Float[Array, "T D"],
    cache: LayerCache,
    ropes: LayerRopes,
    routing: Routing,
    place: Int[Array, ""],
    starts: Int[Array, " B"],
) -> tuple[Float[Array, "T D"], LayerCache]:
    attention = layer.self_attn
    projected = attention.project(layer.attention_norm(h), ropes, routing)
    q, k, v = (x.reshape(len(starts), -1, *x.shape[1:]) for x in projected)
    out, cache = cached_attention(q, k, v, cache, place, starts, attention.scoring)
    y = attention.o_proj(out.reshape(len(h), -1), routing)
    return layer.feed_forward(layer.add_attention(h, y), routing), cache
