"""Quantized bases generate, too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import Routing, load_model
from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.generate.batch import Batch, Request
from jaxlora.generate.loaded import load_decoder
from jaxlora.modules.loss import head_logits
from tests import tiny
from tests.oracle import relative_error

PROMPT = np.arange(9, dtype=np.int32)


def uncached_logits(decoder, token_ids):
    """Logits after the last token, by the forward pass of training."""
    options = dataclasses.replace(decoder.spec.options, max_segment_tokens=64)
    spec = dataclasses.replace(decoder.spec, options=options)

    @jax.jit
    def run(params, token_ids):
        bound = spec.bind(params)
        order = jnp.arange(len(token_ids))
        routing = Routing(block_adapter=jnp.zeros(1, jnp.int32))
        hidden = bound(token_ids, order, jnp.zeros_like(order), routing)
        head, transposed = bound.stored_head(hidden)
        return head_logits(hidden[-1:], head, head_transposed=transposed)[0]

    return np.asarray(run(decoder.weights()[0].base, jnp.asarray(token_ids)))


@pytest.mark.parametrize(
    ("quantized", "tolerance"),
    [
        ("fp8", 2e-2),
        pytest.param("int8", 1e-5, marks=pytest.mark.grid),
        pytest.param("nf4", 1e-5, marks=pytest.mark.grid),
    ],
)
def test_a_quantized_base_generates(tmp_path, quantized, tolerance):
    """In fp8, sums in another order move some activations to the next number."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = {**tiny.CONFIG, **sizes}
    folder = tiny.write_model(tmp_path, config=config)
    model = load_model(folder, dtype="float32", quantize=quantized)
    decoder = load_decoder(model, ())
    request = Request(token_ids=PROMPT, slot=0, seed=0, max_new_tokens=3)
    batch = Batch(decoder, [request], GenerationSettings(), ())
    assert relative_error(batch.logits[0], uncached_logits(decoder, PROMPT)) < tolerance
    batch.advance(2)
    token_ids = np.append(PROMPT, batch.answers[0].token_ids).astype(np.int32)
    assert len(token_ids) == len(PROMPT) + 2
    wanted = uncached_logits(decoder, token_ids)
    assert relative_error(batch.logits[0], wanted) < tolerance
