"""The training step that benchmarks time, and its random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.profile.training import SCORES, random_base
from scripts.bench.shapes import config_json
from scripts.bench.step.cases import FROZEN, ROWS, Case, microbatches
from scripts.bench.step.measure import BaseAlone, plan_row


def test_the_base_alone_has_gradients_from_every_job():
    """Products of zeros draw less power, so a base that had them would look fast."""
    case = Case(
        model="tiny",
        row=FROZEN,
        layers=1,
        adapters=2,
        microbatch_tokens=128,
        block_tokens=32,
        median_tokens=20,
        longest_tokens=40,
        dtype="float32",
    )
    model = model_config(config_json("tiny", 1))
    drawn = microbatches(case, model.vocab_size)
    plan, _ = plan_row(case, ROWS[FROZEN], model, drawn)
    training, batch = BaseAlone(plan), drawn[0].packed

    weights = batch.loss_inputs["next_token"]["weight"]

    def gradient(weights):
        inputs = {"next_token": {"weight": weights}}
        weighted = dataclasses.replace(batch, loss_inputs=inputs)
        (made,) = training.start([weighted])()
        return made

    is_first = np.repeat(batch.block_adapter == 0, case.block_tokens)
    first = gradient(np.where(is_first, weights, 0))
    second = gradient(np.where(is_first, 0, weights))
    assert jnp.abs(first).max() > 0 and jnp.abs(second).max() > 0
    np.testing.assert_allclose(gradient(weights), first + second, rtol=1e-4, atol=1e-6)


def test_attention_scores_have_the_wanted_deviation():
    model = model_config(config_json("tiny"))
    options = DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=8)
    base = random_base(DecoderSpec(config=model, options=options).base_shapes())
    x = jax.random.normal(jax.random.key(0), (256, model.hidden_size))  # as a norm's
    e = model.head_dim
    q, k = (x @ base[f"layers.0.self_attn.{name}_proj.kernel"][:, :e] for name in "qk")
    assert (q @ k.T / e**0.5).std() == pytest.approx(SCORES, rel=0.1)
