"""Weights of messages become weights of the tokens of their turns."""

import numpy as np
import pytest

from jaxlora.data.tokens.token_cache import TokenCache
from jaxlora.errors import DataError
from jaxlora.objectives.base import Terms
from jaxlora.objectives.table import NEXT_TOKEN
from tests.jaxlora.data import chat_templates
from tests.jaxlora.data.chat_templates import TALK


def weighted(*weights) -> dict:
    messages = [
        message if weight is None else message | {"weight": weight}
        for message, weight in zip(TALK, weights, strict=True)
    ]
    return {"messages": messages}


def learned(sample, tokenizer) -> list[tuple[str, float]]:
    """Returns the text of each run of targets of the same weight, and the weight."""
    weights = np.where(sample.is_target, sample.weights, 0)
    edges = np.flatnonzero(np.diff(weights)) + 1
    ids, values = np.split(sample.token_ids, edges), np.split(weights, edges)
    parts = zip(ids, values, strict=True)
    return [(tokenizer.decode(ids), float(w[0])) for ids, w in parts if w[0]]


@pytest.mark.parametrize("template", ["SMOLLM2", "GENERATION", "LLAMA3", "REASONING"])
def test_each_answer_has_its_weight(run, make_tokenizer, template):
    tokenizer = make_tokenizer(getattr(chat_templates, template))
    plain = run([weighted(None, 1, None, None)], tokenizer).samples[0]
    sample = run([weighted(None, 0.5, 7, 3)], tokenizer).samples[0]
    assert plain.weights is None
    assert np.array_equal(sample.token_ids, plain.token_ids)
    assert np.array_equal(sample.is_target, plain.is_target)
    assert sample.sum_of_weights == sample.weights[sample.is_target].sum()
    (first, one), (second, other) = learned(sample, tokenizer)
    assert (one, other) == (0.5, 3) and "Hello!" in first and "Fine." in second
    assert sample.weights[~sample.is_target].tolist() == [1] * (~plain.is_target).sum()


def test_weights_with_other_settings_of_the_loss(run, make_tokenizer):
    """The weight of an answer that is not trained on has no effect."""
    tokenizer = make_tokenizer()
    record = weighted(0.25, 2, None, 0.5)
    (sample,) = run([record], tokenizer, data={"loss_on": "last"}).samples
    assert learned(sample, tokenizer) == [("Fine.\n<|im_end|>", 0.5)]
    (sample,) = run([record], tokenizer, data={"loss_on": "all"}).samples
    found = [weight for _, weight in learned(sample, tokenizer)]
    assert found == [0.25, 1, 2, 1, 0.5, 1]
    (sample,) = run([weighted(None, 0, None, 5)], tokenizer).samples
    assert learned(sample, tokenizer) == [("Fine.\n<|im_end|>", 5)]
    messages = record["messages"]
    halves = {"prompt": messages[:1], "completion": messages[1:]}
    (sample,) = run([halves], tokenizer).samples
    assert [weight for _, weight in learned(sample, tokenizer)] == [2, 0.5]


def test_weights_are_kept_and_cut_with_tokens(run, make_tokenizer, tmp_path):
    """In the cache as well, where a record may have none."""
    tokenizer = make_tokenizer()
    records = [weighted(None, 2, None, 3), weighted(None, 1, None, 1)]
    whole = run(records, tokenizer)
    first = whole.samples[0]
    limit = int(np.flatnonzero(first.is_target)[-1]) - 2
    cut = run(records, tokenizer, max_length=limit).samples[0]
    assert np.array_equal(cut.weights, first.weights[:limit])
    assert [s.weights is None for s in whole.samples] == [False, True]
    assert all(
        (one.weights is None) == (other.weights is None)
        for one, other in zip(whole.samples, list(whole.samples), strict=True)
    )
    cache = TokenCache(tmp_path / "cache")
    cache.store("a", whole.samples.sets[0])
    found = cache.load("a", "x")
    assert found.weights_of(1) is None
    assert np.array_equal(found.weights_of(0), first.weights)
    assert whole.fingerprint != run([*records[1:], *records[1:]], tokenizer).fingerprint
    assert whole.fingerprint != run([records[1]] * 2, tokenizer).fingerprint


def test_the_loss_is_a_weighted_mean(run, make_tokenizer):
    sample = run([weighted(None, 2, None, 0.5)], make_tokenizer()).samples[0]
    total = NEXT_TOKEN.num_terms([sample, sample])
    assert total == 2 * sample.sum_of_weights
    inputs = NEXT_TOKEN.row_inputs([sample], Terms(weight=1 / total))
    wanted = np.append(np.where(sample.is_target, sample.weights, 0)[1:], 0)
    np.testing.assert_allclose(inputs["weight"], wanted / total, rtol=1e-6)


def test_preferences_have_no_weights(run, make_tokenizer):
    answers = {"rejected": weighted(None, 1, None, 1)["messages"]}
    answers["chosen"] = weighted(None, 1, None, 2)["messages"]
    labelled = weighted(None, 1, None, 2) | {"label": True}
    for record, objective in ((answers, "orpo"), (labelled, "kto")):
        with pytest.raises(DataError, match="neither 0 nor 1, which only objective n"):
            run([record], make_tokenizer(), objective=objective)
