"""Logits of generation are those of transformers, and of training."""

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import load_model
from jaxlora.generate.batch import Batch, Request
from jaxlora.generate.loaded import load_decoder
from tests import tiny
from tests.jaxlora.models.test_logits import CASES, MODELS, packed_logits
from tests.oracle import relative_error

# With soft caps and windows of some layers, another rope, and sinks. The logits of all
# models are compared in `test_logits.py`.
ALWAYS = ("gemma2", "llama3", "qwen2_window", "gpt_oss")
# The prompts of make_generation.py: number of a sequence, and tokens of it.
PROMPTS = ((0, 83), (0, 9), (1, 21), (1, 1))


def begun(model, prompts, max_new_tokens=1):
    """A batch of greedy texts whose prompts have run."""
    requests = [
        Request(token_ids=ids, slot=0, seed=0, max_new_tokens=max_new_tokens)
        for ids in prompts
    ]
    return Batch.of(load_decoder(model, ()), requests)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ALWAYS else pytest.mark.grid)
        for case in CASES
    ],
)
def test_greedy_tokens_equal_those_of_transformers(case):
    """The logits after the last token are compared, too, as some models repeat one."""
    model = load_model(MODELS / case, dtype="float32")
    golden = np.load(MODELS / case / "logits.npz")
    generated = np.load(MODELS / case / "generation.npz")
    prompts = [golden[f"tokens_{i}"][:length] for i, length in PROMPTS]
    batch = begun(model, prompts, generated["tokens"].shape[1])
    prefill = np.stack([golden[f"logits_{i}"][n - 1] for i, n in PROMPTS])
    assert relative_error(batch.logits, prefill) < 1e-5
    while not batch.is_done:
        batch.advance()
    found = [answer.token_ids for answer in batch.answers]
    assert found == generated["tokens"].tolist()
    assert relative_error(batch.logits, generated["logits"]) < 2e-5


def test_layers_run_in_the_order_of_their_numbers(tmp_path):
    """With more than ten layers, this is not the order of their names.

    The third layer and the last one are those of a model of two layers. The others add
    nothing.
    """
    two, weights = tiny.random_weights(), {}
    for number in range(11):
        source = {2: 0, 10: 1}.get(number, 0)
        for name, value in two.items():
            if name.startswith(f"model.layers.{source}."):
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                stays = number in (2, 10) or not adds
                name = name.replace(f".{source}.", f".{number}.", 1)
                weights[name] = value if stays else np.zeros_like(value)
    weights |= {k: v for k, v in two.items() if ".layers." not in k}
    config = {**tiny.CONFIG, "num_hidden_layers": 11}
    folder = tiny.write_model(tmp_path / "many", config=config)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    many = load_model(folder, dtype="float32")
    few = load_model(tiny.write_model(tmp_path / "two"), dtype="float32")
    prompt = np.arange(9, dtype=np.int32)
    (wanted,) = packed_logits(few, [prompt], total=64)
    assert relative_error(begun(many, [prompt]).logits[0], wanted[-1]) < 1e-5


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
    folder = tiny.write_model(tmp_path, config={**tiny.CONFIG, **sizes})
    model = load_model(folder, dtype="float32", quantize=quantized)
    prompt = np.arange(9, dtype=np.int32)
    batch = begun(model, [prompt], max_new_tokens=3)
    found = [batch.logits[0]]
    batch.advance(2)
    found.append(batch.logits[0])
    longer = np.append(prompt, batch.answers[0].token_ids).astype(np.int32)
    assert len(longer) == len(prompt) + 2
    wanted = packed_logits(model, [prompt, longer], total=64)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs[-1]) < tolerance
