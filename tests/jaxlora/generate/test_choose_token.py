"""How tokens are chosen from logits."""

import jax
import numpy as np

from jaxlora.generate.choose_token import choose_tokens, most_likely, nucleus

SHARES = [[0.5, 0.3, 0.15, 0.05], [0.05, 0.05, 0.1, 0.8]]
LOGITS = np.log(np.array(SHARES, np.float32))
NUCLEUS, MOST_LIKELY = jax.jit(nucleus), jax.jit(most_likely)


def test_the_nucleus_is_the_fewest_tokens_that_add_up():
    for top_p, *counts in ((1e-6, 1, 1), (0.49, 1, 1), (0.79, 2, 1), (1.0, 4, 4)):
        found = np.asarray(NUCLEUS(LOGITS, np.full(2, top_p, np.float32)))
        assert found.sum(1).tolist() == counts
    found = np.asarray(NUCLEUS(LOGITS, np.full(2, 0.79, np.float32)))
    assert found[0].tolist() == [True, True, False, False]


CHOOSE = jax.jit(choose_tokens)


def draw(seeds, temperature=1.0, top_p=1.0, top_k=0, step=0):
    num = len(seeds)
    each = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), num)
    return np.asarray(
        CHOOSE(
            np.repeat(LOGITS[:1], num, axis=0),
            each(seeds, np.int32),
            each(step, np.int32),
            each(temperature, np.float32),
            each(top_p, np.float32),
            each(top_k, np.int32),
        )
    )


def test_samples_follow_the_probabilities():
    seeds = np.arange(4000)
    for temperature in (1.0, 0.5):
        wanted = np.exp(np.asarray(LOGITS[0], np.float64) / temperature)
        counts = np.bincount(draw(seeds, temperature), minlength=4)
        share = counts / len(seeds)
        np.testing.assert_allclose(share, wanted / wanted.sum(), atol=0.03)


def test_the_nucleus_alone_is_sampled():
    tokens = draw(np.arange(500), top_p=0.79)
    assert set(tokens.tolist()) == {0, 1}
    assert set(draw(np.arange(9), temperature=0).tolist()) == {0}


def test_the_most_likely_tokens_are_those_of_a_sort():
    logits = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    for k in (1, 7, 50):
        marked = np.asarray(MOST_LIKELY(logits, np.full(5, k)))
        np.testing.assert_array_equal(marked, logits >= -np.sort(-logits)[:, [k - 1]])
    ties = np.array([[1.0, 2.0, 2.0, 0.0]], np.float32)
    marked = MOST_LIKELY(ties, np.array([1]))
    assert marked.tolist() == [[False, True, True, False]]


def test_top_p_is_of_what_top_k_leaves():
    """Of 0.5, 0.3 and 0.15, the first two have 0.84."""
    for top_p, tokens in ((0.83, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2})):
        assert set(draw(np.arange(500), 1.0, top_p, top_k=3).tolist()) == tokens


def test_the_settings_of_others_do_not_change_a_token():
    seeds = np.arange(40)
    plain, cold = draw(seeds), draw(seeds, 0.5, 0.9, 3)
    is_cold, odd = seeds % 2 == 1, np.where(seeds % 2 == 1, 0.5, 1.0)
    mixed = draw(seeds, odd, np.where(is_cold, 0.9, 1), np.where(is_cold, 3, 0))
    np.testing.assert_array_equal(mixed, np.where(is_cold, cold, plain))
    greedy = draw(seeds, np.where(is_cold, 0.0, 1.0))
    np.testing.assert_array_equal(greedy, np.where(is_cold, 0, plain))


def test_steps_and_seeds_draw_independently():
    seeds = np.arange(200)
    first, second = draw(seeds), draw(seeds, step=1)
    assert 0.2 < np.mean(first == second) < 0.6
    np.testing.assert_array_equal(draw(seeds[7:9]), first[7:9])
