"""The random weights of the step that is timed."""

import jax
import jax.numpy as jnp
import pytest

from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.profile.training import SCORES, random_base
from scripts.bench.shapes import config_json


def test_attention_scores_have_the_wanted_deviation():
    model = model_config(config_json("tiny"))
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=8)
    base = random_base(DecoderSpec(config=model, options=options).base_shapes())
    x = jax.random.normal(jax.random.key(0), (256, model.hidden_size))  # as a norm's
    e = model.head_dim
    q, k = (x @ base[f"layers.0.self_attn.{name}_proj.kernel"][:, :e] for name in "qk")
    assert (q @ k.T / e**0.5).std() == pytest.approx(SCORES, rel=0.1)
