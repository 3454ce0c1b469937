"""Roundings, dtypes, ids outside of tables and empty dimensions are kept."""

import pytest

import jaxlora
from tests.jaxlora.fuse.forms import (  # noqa: F401
    careful_dtypes,
    careful_ids,
    careful_parts,
    careful_values,
)
from tests.jaxlora.fuse.forms.careful import CAREFUL
from tests.jaxlora.fuse.generator.around import gradient, with_gradients
from tests.jaxlora.fuse.generator.check import compare, settings

# JAX warns of ids that are floats, which is what a draw may be about.
pytestmark = pytest.mark.filterwarnings("ignore:jax.nn.one_hot input")


@pytest.mark.parametrize(
    "is_gradient",
    [
        pytest.param(False, id="fuse"),
        pytest.param(True, id="fuse of grad", marks=pytest.mark.grid),
    ],
)
@pytest.mark.parametrize("name", CAREFUL)
def test_values_and_gradients_are_kept(name, is_gradient):
    """The rule holds for what is rewritten, and the rest has the same program."""
    case = CAREFUL[name]
    inside, outside = (gradient, _named) if is_gradient else (_same, with_gradients)
    function = inside(lambda p: case.function(**p))
    with settings(x64=case.x64):
        verdict = compare(
            fused=lambda: outside(jaxlora.fuse(function, implementation="xla")),
            original=outside(function),
            p=case.arguments(),
        )
    assert not verdict.faults, "\n".join(verdict.faults)


def _same(function):
    return function


def _named(function):
    return lambda p: {str(k): v for k, v in function(p).items()}
