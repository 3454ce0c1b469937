"""The training step that benchmarks time, and its random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.bench.shapes import config_json
from jaxlora.bench.tokens import full_microbatch
from jaxlora.bench.training import Setup, Training
from jaxlora.bench.weights import SCORES, random_base
from jaxlora.hf.config import model_config
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import Limits


@pytest.mark.usefixtures("compiled_quickly")
def test_the_base_alone_has_gradients_from_every_job():
    """Products of zeros draw less power, so a base that had them would look fast."""
    model = model_config(config_json("tiny", 1))
    limits = Limits(capacity=128, block_tokens=32)
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=40)
    setup = Setup(model=model, options=options, limits=limits, num_jobs=0)
    lengths = {"median": 20, "longest": 40}
    batch = full_microbatch(2, limits, model.vocab_size, **lengths, seed=0).packed
    base = random_base(setup.spec().base_shapes())
    training = Training(setup, base, batch)

    def gradient(loss_weight):
        weighted = dataclasses.replace(batch, loss_weight=loss_weight)
        (made,) = training.start([weighted])()
        return made

    is_first = np.repeat(batch.block_adapter == 0, limits.block_tokens)
    first = gradient(np.where(is_first, batch.loss_weight, 0))
    second = gradient(np.where(is_first, 0, batch.loss_weight))
    assert jnp.abs(first).max() > 0 and jnp.abs(second).max() > 0
    np.testing.assert_allclose(
        gradient(batch.loss_weight), first + second, rtol=1e-4, atol=1e-6
    )


def test_attention_scores_have_the_wanted_deviation():
    model = model_config(config_json("tiny"))
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=8)
    base = random_base(DecoderSpec(config=model, options=options).base_shapes())
    x = jax.random.normal(jax.random.key(0), (256, model.hidden_size))  # as a norm's
    e = model.head_dim
    q, k = (x @ base[f"layers.0.self_attn.{name}_proj.kernel"][:, :e] for name in "qk")
    assert (q @ k.T / e**0.5).std() == pytest.approx(SCORES, rel=0.1)
