"""Random functions keep their values, gradients and roundings when they are fused."""

import pytest

from tests.jaxlora.fuse.generator.check import check, is_fused_alike
from tests.jaxlora.fuse.generator.features import draw, plain_draw

# JAX warns of ids that are floats, which is what a draw may be about.
pytestmark = pytest.mark.filterwarnings("ignore:jax.nn.one_hot input")

SEEDS = range(320)
OFTEN = 10  # one of so many functions is always drawn; all of them are of the grid
PLAIN_SEEDS = range(32)
COMPILED_SEEDS = range(0, 320, 32)
AUTO_SEEDS = range(0, 320, 32)


def some_of(seeds: range) -> list:
    """Marks all but every tenth seed as the grid's."""
    return [
        pytest.param(seed, marks=pytest.mark.grid if seed % OFTEN else ())
        for seed in seeds
    ]


@pytest.mark.parametrize("seed", some_of(SEEDS))
def test_a_fused_function_is_as_accurate_as_the_original(seed):
    """A rewritten function obeys the rule; any other has the same program."""
    function = draw(seed)
    compiled = seed in COMPILED_SEEDS
    verdict = check(function, compiled=compiled, implementation="xla")
    assert not verdict.faults, f"{function}:\n" + "\n".join(verdict.faults)


@pytest.mark.parametrize("seed", some_of(PLAIN_SEEDS))
def test_what_the_documentation_lists_is_rewritten(seed):
    function = plain_draw(seed)
    verdict = check(function, implementation="xla")
    assert verdict.is_rewritten and not verdict.faults, f"{function}: {verdict}"


@pytest.mark.parametrize("seed", AUTO_SEEDS)
def test_the_default_back_end_leaves_a_function_or_fuses_it_likewise(seed):
    assert is_fused_alike(draw(seed)), f"{draw(seed)}"
