"""Random functions keep their values, gradients and roundings when they are fused."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.jaxlora.fuse.generator.check import check, is_fused_alike
from tests.jaxlora.fuse.generator.draw import Draw
from tests.jaxlora.fuse.generator.features import draw, plain_draw

# JAX warns of ids that are floats, which is what a draw may be about.
pytestmark = pytest.mark.filterwarnings("ignore:jax.nn.one_hot input")

PLAIN_SEEDS = range(32)
AUTO_SEEDS = range(0, 320, 32)


def choices(function: Draw) -> set[tuple[str, object]]:
    """The fields of a draw with their values; with each value where there are many."""
    found: set[tuple[str, object]] = set()
    for name, value in vars(function).items():
        if name in ("sizes", "rows") or value == () or not isinstance(value, tuple):
            found.add((name, value))
        else:
            found |= {(name, one) for one in value}
    return found - {("seed", function.seed)}


def seeds_with_each_choice(seeds: Iterable[int], times: int = 2) -> list[int]:
    """Seeds whose functions show each choice so many times, if the others do."""
    shown, found = Counter(), []
    for seed in seeds:
        made = choices(draw(seed))
        if any(shown[choice] < times for choice in made):
            found.append(seed)
            shown.update(made)
    return found


SEEDS = seeds_with_each_choice(range(320))
COMPILED_SEEDS = SEEDS[::16]
MORE_SEEDS = sorted({*range(320)} - {*SEEDS})


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(s, marks=pytest.mark.grid) for s in MORE_SEEDS)]
)
def test_a_fused_function_is_as_accurate_as_the_original(seed):
    """What is rewritten obeys the rule; what is not has the same program."""
    function = draw(seed)
    compiled = seed in COMPILED_SEEDS
    verdict = check(function, compiled=compiled, implementation="xla")
    assert not verdict.faults, f"{function}:\n" + "\n".join(verdict.faults)


@pytest.mark.parametrize("seed", PLAIN_SEEDS)
def test_what_the_documentation_lists_is_rewritten(seed):
    function = plain_draw(seed)
    verdict = check(function, implementation="xla")
    assert verdict.is_rewritten and not verdict.faults, f"{function}: {verdict}"


@pytest.mark.parametrize("seed", AUTO_SEEDS)
def test_the_default_back_end_leaves_a_function_or_fuses_it_likewise(seed):
    assert is_fused_alike(draw(seed)), f"{draw(seed)}"
