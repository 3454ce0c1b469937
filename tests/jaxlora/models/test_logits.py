"""Logits and gradients equal those that transformers computed; see tests/golden."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import DecoderOptions, DecoderSpec, Routing, load_model
from jaxlora.models.registry import COMPOSITES, FAMILIES
from jaxlora.modules.loss import target_nll
from jaxlora.modules.scoring import softcap
from tests.oracle import relative_error

MODELS = pathlib.Path(__file__).parents[2] / "golden" / "models"
CASES = sorted(path.name for path in MODELS.iterdir())
# The triangular systems of their chunks magnify rounding, here and in transformers.
HYBRIDS = ("qwen3_5", "qwen3_6", "qwen3_next", "qwen3_5_moe", "qwen3_6_moe")
NO_ADAPTER = Routing(block_adapter=jnp.zeros(1, jnp.int32))  # the base has no slots


def load_config(folder: pathlib.Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def pack(samples, *, total):
    """Returns token_ids, positions and segment_ids of samples in one packed row."""
    token_ids = np.zeros(total, np.int32)
    positions = np.zeros(total, np.int32)
    segments = np.full(total, -1, np.int32)
    at = 0
    for i, sample in enumerate(samples):
        rows = slice(at, at + len(sample))
        token_ids[rows], positions[rows] = sample, np.arange(len(sample))
        segments[rows] = i
        at += len(sample)
    return tuple(map(jnp.array, (token_ids, positions, segments)))


def spec_of(model):
    options = DecoderOptions(
        dtype=model.dtype, base_format=model.base_format, max_segment_tokens=128
    )
    return DecoderSpec(config=model.config, options=options)


def packed_logits(model, samples, *, total):
    """Logits of samples packed in one row of `total` tokens."""
    return logits_and_gradient(model, samples, total)[0]


def logits_and_gradient(model, samples, total):
    """Logits, and the first sample's gradient of the loss by the first norm."""
    spec, (token_ids, *rest) = spec_of(model), pack(samples, total=total)
    norms = ("attention_norm", "attention_output_norm")
    paths = (f"layers.0.{norm}.scale" for norm in norms)
    name = next(path for path in paths if path in model.params)
    is_target = jnp.arange(total) < len(samples[0]) - 1
    softcap_of_logits = model.config.logit_softcap

    def loss(scale, params):
        decoder = spec.bind({**params, name: scale})
        hidden = decoder.head_input(decoder(token_ids, *rest, NO_ADAPTER))
        head, transposed = decoder.stored_head(hidden)
        nll = target_nll(
            hidden,
            head,
            jnp.roll(token_ids, -1),
            is_target,
            head_transposed=transposed,
            logit_softcap=softcap_of_logits,
        )
        logits = hidden @ (head.T if transposed else head)
        return nll.sum(), softcap(logits.astype(jnp.float32), softcap_of_logits)

    run = jax.jit(jax.grad(loss, has_aux=True))
    gradient, logits = run(model.params[name], model.params)
    ends = np.cumsum([len(sample) for sample in samples])
    return np.split(np.asarray(logits)[: ends[-1]], ends[:-1]), np.asarray(gradient)


def test_there_is_a_case_for_every_family():
    cases = {load_config(MODELS / name)["model_type"] for name in CASES}
    assert cases == {*FAMILIES, *COMPOSITES}
    assert {"llama2", "llama3", "smollm2", "gemma3_v4", "gemma3_v5"} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_those_of_transformers(case):
    """There each sequence was computed alone; here they share a row."""
    model = load_model(MODELS / case, dtype="float32")
    golden = np.load(MODELS / case / "logits.npz")
    samples = [golden["tokens_0"], golden["tokens_1"]]
    actual, gradient = logits_and_gradient(model, samples, 256)
    own = 3e-5 if case in HYBRIDS else 1e-5
    for i, logits in enumerate(actual):
        assert relative_error(logits, golden[f"logits_{i}"]) < own
    assert relative_error(gradient, golden["gradient_0"]) < 2 * own


@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(case, marks=pytest.mark.grid)
            for case in ("llama3", "gemma3_v4", "qwen3_5", "gemma4")
        ),
        *("gemma2", "gemma3_v5"),
    ],
)
def test_bfloat16_is_as_accurate_as_in_transformers(case):
    model = load_model(MODELS / case, dtype="bfloat16")
    golden = np.load(MODELS / case / "logits.npz")
    (logits,) = packed_logits(model, [golden["tokens_1"]], total=128)
    error = np.max(np.abs(logits - golden["logits_1"]))
    assert error < 2 * golden["bfloat16_error_1"]
