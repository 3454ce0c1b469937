import jax
import jax.numpy as jnp
import pytest

from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
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
