"""A decoder layer keeps only what its backward pass needs of each token."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ModelConfig, Rope
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import FAMILIES
from jaxlora.models.structure import linears
from jaxlora.modules import rows
from jaxlora.modules.length_classes import SegmentLengths
from jaxlora.modules.multi_lora_linear import Routing, SlotShape

# All sizes differ, so a shape identifies an array.
T, D, F, H, HK, E, R = 96, 40, 112, 4, 2, 14, 6


@jax.custom_vjp
def stand_in(q, k, v):
    return q + jnp.repeat(k + v, H // HK, axis=1)


def stand_in_forward(q, k, v):
    return stand_in(q, k, v), (q, k, v, jnp.zeros((q.shape[0], H), jnp.float32))


# Keeps what flash attention keeps, less the output, which the o projection keeps.
stand_in.defvjp(stand_in_forward, lambda kept, dy: (dy, kept[1], kept[2]))


def residuals(model_type: str) -> list[jax.core.ShapedArray]:
    config = ModelConfig(
        family=FAMILIES[model_type].FAMILY,
        vocab_size=50,
        hidden_size=D,
        intermediate_size=F,
        num_layers=1,
        num_heads=H,
        num_kv_heads=HK,
        head_dim=E,
        max_positions=512,
        rms_eps=1e-5,
        rope=Rope(theta=1e4),
        layer_windows=(None,),
    )

    options = DecoderOptions(dtype=jnp.dtype(jnp.bfloat16), max_segment_tokens=T)
    slots = SlotShape(num_slots=3, rank=R)
    adapted = {f"layers.0.{name}" for name in linears(config)}
    make = LayerBuilder(config, 0, options, slots, adapted)
    layer = config.family.layer(config, make)
    graph, adapters, rest = nnx.split(layer, nnx.LoRAParam, ...)
    packed = rows.PackedRows(
        ropes=rows.layer_ropes(config, jnp.arange(T)),
        segment_ids=jnp.zeros(T, jnp.int32),
        routing=Routing(block_adapter=jnp.array([0, 1, 2])),
        lengths=SegmentLengths(T, T),
    )

    def run(adapters, h):
        layer = nnx.merge(graph, adapters, rest)
        return layer(h, packed)

    h = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda *given: jax.vjp(run, *given)[1])(adapters, h)
    kept = [x.aval for x in {*traced.jaxpr.outvars} if x.aval.ndim > 1]
    # Weights are kept too; rows are those of tokens, or of blocks of tokens.
    return [x for x in kept if T in (x.shape[0], x.shape[0] * x.shape[1])]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_layer_keeps_each_value_once_and_narrow(monkeypatch, model_type):
    monkeypatch.setattr(
        rows, "packed_attention", lambda q, k, v, *_, **__: stand_in(q, k, v)
    )
    kept = residuals(model_type)
    residual_stream = 2 * D  # the inputs of the layer and of the MLP
    normed = 2 * D
    heads = (H + 2 * HK) * E + H * E  # q, k, v and the output of attention
    unnormed = (H + HK) * E if model_type == "qwen3" else 0
    mlp = 3 * F  # gate, up and their product
    shrunk = 7 * R
    narrow = residual_stream + normed + heads + unnormed + mlp + shrunk
    wide = H + E  # softmax statistics; cosine and sine, shared by all layers
    assert sum(x.size * x.dtype.itemsize for x in kept) == T * (2 * narrow + 4 * wide)
    assert all(x.size <= T * E for x in kept if x.dtype == jnp.float32)
