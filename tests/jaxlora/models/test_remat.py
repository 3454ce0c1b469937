"""Tests of the work that the backward pass of a layer does again."""

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from jaxlora.models.forward import job_losses
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan.memory.inputs import batch_shapes, key_shapes
from jaxlora.scheduler import Limits
from tests import tiny

HEAVY = ("dot_general", "ffi_call")


def primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Names of the operations of a program, nested ones included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values())):
            if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
                yield from primitives(getattr(value, "jaxpr", value))


def heavy_work(remat: str) -> collections.Counter:
    """Counts the products and attention calls of a training step."""
    spec = DecoderSpec(
        config=model_config(tiny.CONFIG),
        options=DecoderOptions(
            dtype=jnp.dtype("bfloat16"),
            remat=remat,  # type: ignore[arg-type]
            attention="cudnn",
            max_segment_tokens=64,
            mean_segment_tokens=32,
        ),
        slots=SlotShape(num_slots=2, rank=4),
        adapted=("layers.0.mlp.down_proj", "layers.1.self_attn.q_proj"),
    )

    def gradients(base, params, settings, batch, keys):
        def loss(params):
            tables = to_modules(spec.stacks, params)
            return job_losses(spec, base, tables, settings, batch, keys).loss.sum()

        return jax.grad(loss)(params)

    traced = jax.make_jaxpr(gradients)(
        spec.base_shapes(),
        spec.adapter_shapes(),
        spec.settings_shapes(),
        batch_shapes(Limits(capacity=128, block_tokens=32)),
        key_shapes(spec),
    )
    found = collections.Counter(primitives(traced.jaxpr))
    return collections.Counter({name: found[name] for name in HEAVY})


def test_elementwise_computes_no_product_and_no_attention_again():
    once = heavy_work("none")
    assert once["dot_general"] > 10 and once["ffi_call"] > 1
    assert heavy_work("elementwise") == once


@pytest.mark.parametrize("remat", ["mlp", "layer"])
def test_the_others_do(remat):
    assert heavy_work(remat)["dot_general"] > heavy_work("none")["dot_general"]
