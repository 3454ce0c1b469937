"""Logits of each family equal those that transformers computed; see tests/golden."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import DecoderOptions, DecoderSpec, Routing, load_model
from tests.oracle import relative_error

MODELS = pathlib.Path(__file__).parents[2] / "golden" / "models"
FAMILIES = sorted(path.name for path in MODELS.iterdir())


def packed_logits(model, samples, *, total):
    """Logits of samples packed in one row of `total` tokens."""
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(dtype=model.dtype, max_segment_tokens=128),
    )
    token_ids = np.zeros(total, np.int32)
    positions = np.zeros(total, np.int32)
    segments = np.full(total, -1, np.int32)
    at = 0
    for i, sample in enumerate(samples):
        rows = slice(at, at + len(sample))
        token_ids[rows], positions[rows] = sample, np.arange(len(sample))
        segments[rows] = i
        at += len(sample)

    @jax.jit
    def run(params):
        decoder = spec.bind(params)
        nobody = Routing(block_adapter=jnp.full(1, -1))
        rows = map(jnp.array, (token_ids, positions, segments))
        hidden = decoder(*rows, nobody)
        return hidden @ decoder.head_kernel()

    logits = np.asarray(run(model.params))
    ends = np.cumsum([len(sample) for sample in samples])
    return np.split(logits[: ends[-1]], ends[:-1])


def test_every_family_is_there():
    assert {"llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen3"} <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    """Each sequence was computed alone there; here they share a row."""
    model = load_model(MODELS / family, dtype="float32")
    golden = np.load(MODELS / family / "logits.npz")
    samples = [golden["tokens_0"], golden["tokens_1"]]
    actual = packed_logits(model, samples, total=256)
    for i, logits in enumerate(actual):
        assert relative_error(logits, golden[f"logits_{i}"]) < 1e-5
