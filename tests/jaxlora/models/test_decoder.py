import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxlora.models import layer
from jaxlora.models.forward import job_losses
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import to_modules
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan.memory.inputs import batch_shapes, key_shapes
from jaxlora.scheduler import Limits
from tests import tiny


def test_arrays_of_another_decoder_are_refused():
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=64)
    spec = DecoderSpec(config=model_config(tiny.CONFIG), options=options)
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec.base_shapes())
    spec.bind(arrays)
    name = next(iter(arrays))
    renamed = {"other": arrays.pop(name), **arrays}
    with pytest.raises(ValueError, match=rf"missing \['{name}'\], unknown \['other'\]"):
        spec.bind(renamed)


@pytest.mark.parametrize(
    ("windows", "adapted", "num_kinds"),
    [
        ((None,) * 6, range(6), 1),
        ((None, 32, None, 32, None, 32), range(6), 2),
        ((None, 32, None, 32, None, 32), range(3), 4),
    ],
    ids=["one kind", "two windows", "with and without slots"],
)
def test_alike_layers_are_traced_once(windows, adapted, num_kinds, monkeypatch):
    """Neither a layer more nor its number, which keys dropout, makes a trace more."""
    config = dataclasses.replace(
        model_config(tiny.CONFIG), num_layers=len(windows), layer_windows=windows
    )
    spec = DecoderSpec(
        config=config,
        options=DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=64),
        slots=SlotShape(num_slots=2, rank=4, use_dropout=True),
        adapted=tuple(f"layers.{i}.mlp.up_proj" for i in adapted),
    )
    traced, run = [], layer.run_layer

    def counted(*args):
        traced.append(args)
        return run(*args)

    def gradients(base, params, *inputs):
        def loss(params):
            tables = to_modules(spec.stacks, params)
            return job_losses(spec, base, tables, *inputs).loss.sum()

        return jax.grad(loss)(params)

    monkeypatch.setattr(layer, "run_layer", counted)
    jax.eval_shape(
        gradients,
        spec.base_shapes(),
        spec.adapter_shapes(),
        spec.settings_shapes(),
        batch_shapes(Limits(capacity=128, block_tokens=32)),
        key_shapes(spec),
    )
    assert len(traced) == num_kinds
