"""Shapes of a decoder's variables, of which only unlike layers are traced."""

import dataclasses

import pytest
from flax import nnx

from jaxlora.models.base_format import BaseFormat
from jaxlora.modules.base_param import BaseParam
from tests.llama import LLAMA_1B, decoder

KEPT = ("layers.2.mlp.up_proj", "layers.10.self_attn.q_proj")


def traced(spec, kind):
    """The shapes of the variables of the whole decoder, as `bind` knows them."""
    _, state = spec._split
    return {
        ".".join(map(str, path)): (variable.shape, variable.dtype)
        for path, variable in nnx.to_flat_state(state)
        if isinstance(variable, kind)
    }


@pytest.mark.parametrize(
    ("base_format", "tied"),
    [(None, True), (BaseFormat.named("nf4", kept=KEPT), False)],
)
def test_shapes_are_those_of_the_whole_decoder(base_format, tied):
    """In the same order, too; the layers differ in what is adapted and quantized."""
    config = dataclasses.replace(
        LLAMA_1B, num_layers=12, layer_windows=(None, 64) * 6, tie_embeddings=tied
    )
    spec = decoder(config, base_format=base_format)
    left_out = "layers.3.", "layers.7.mlp.down_proj"
    adapted = tuple(p for p in spec.adapted if not p.startswith(left_out))
    spec = dataclasses.replace(spec, adapted=adapted)
    for part in (spec, spec.stage(0, 7), spec.stage(2, 11)):
        for kind in (BaseParam, nnx.LoRAParam):
            shapes = part.shapes(kind)
            found = {path: (x.shape, x.dtype) for path, x in shapes.items()}
            assert list(found.items()) == list(traced(part, kind).items())
