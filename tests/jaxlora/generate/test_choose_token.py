"""How tokens are chosen from logits."""

import jax.numpy as jnp
import numpy as np

from jaxlora.generate.choose_token import choose_tokens, method_of, nucleus

LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.05, 0.05, 0.1, 0.8]]))


def test_the_nucleus_is_the_fewest_tokens_that_add_up():
    for top_p, counts in ((1e-6, (1, 1)), (0.49, (1, 1)), (0.79, (2, 1)), (1, (4, 4))):
        assert tuple(nucleus(LOGITS, jnp.float32(top_p)).sum(1)) == counts
    assert nucleus(LOGITS, jnp.float32(0.79))[0].tolist() == [True, True, False, False]


def draw(method, seeds, temperature=1.0, top_p=1.0, step=0):
    logits = jnp.repeat(LOGITS[:1], len(seeds), axis=0)
    seeds, step = jnp.asarray(seeds, jnp.int32), jnp.int32(step)
    numbers = jnp.float32(temperature), jnp.float32(top_p)
    return np.asarray(choose_tokens(logits, method, seeds, step, *numbers))


def test_samples_follow_the_probabilities():
    seeds = np.arange(4000)
    for temperature in (1.0, 0.5):
        wanted = np.exp(np.asarray(LOGITS[0], np.float64) / temperature)
        counts = np.bincount(draw("sample", seeds, temperature), minlength=4)
        share = counts / len(seeds)
        np.testing.assert_allclose(share, wanted / wanted.sum(), atol=0.03)


def test_the_nucleus_alone_is_sampled():
    tokens = draw("nucleus", np.arange(500), top_p=0.79)
    assert set(tokens.tolist()) == {0, 1}
    assert set(draw("greedy", np.arange(9)).tolist()) == {0}


def test_steps_and_seeds_draw_independently():
    seeds = np.arange(200)
    first, second = draw("sample", seeds), draw("sample", seeds, step=1)
    assert 0.2 < np.mean(first == second) < 0.6
    np.testing.assert_array_equal(draw("sample", seeds[7:9]), first[7:9])


def test_the_cheapest_method_is_chosen():
    assert method_of(0.0, 0.5) == "greedy"
    assert method_of(0.7, 1.0) == "sample"
    assert method_of(0.7, 0.9) == "nucleus"
