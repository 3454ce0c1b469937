"""Sequences that join a batch while others run give what they give alone."""

import numpy as np
import pytest

from jaxlora import load_model
from jaxlora.generate.batch import Batch, BatchShape, Request
from jaxlora.generate.loaded import load_decoder
from tests.jaxlora.generate.test_golden import PROMPTS
from tests.jaxlora.models.test_logits import CASES, MODELS

SHAPE = BatchShape(num_rows=3, prompt_rows=2, part_tokens=32, cache_tokens=128)
# With states of the gated delta rule, and with windows, sinks and experts.
ALWAYS = ("qwen3_5", "gpt_oss")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ALWAYS else pytest.mark.grid)
        for case in CASES
    ],
)
def test_sequences_that_join_have_the_tokens_of_transformers(case):
    """A row's earlier sequence leaves nothing, and a prompt runs once for two rows."""
    model = load_model(MODELS / case, dtype="float32")
    golden = np.load(MODELS / case / "logits.npz")
    wanted = np.load(MODELS / case / "generation.npz")["tokens"].tolist()
    lengths = 2, 7, 31, len(wanted[0])
    requests = [
        Request(
            token_ids=golden[f"tokens_{i}"][:length],
            slot=0,
            seed=0,
            max_new_tokens=len(wanted[0]),
        )
        for i, length in PROMPTS
    ]
    batch, found = Batch(load_decoder(model, ()), SHAPE), []
    waiting = [[0, 0], [1], [2], [3], [0], [2]]
    for steps in lengths * 9:
        while waiting and len(waiting[0]) <= batch.num_free:
            numbers = waiting.pop(0)
            (answers,) = batch.join([[requests[number] for number in numbers]])
            found += zip(numbers, answers, strict=True)
        while batch.runs_prompts:
            batch.advance()
        if batch.is_done:
            break
        batch.advance(steps)
    assert not waiting and len(found) == 7
    for number, answer in found:
        assert answer.token_ids == wanted[number]
