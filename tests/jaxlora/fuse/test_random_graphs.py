"""In random functions, the branch is found where it is, and nothing else is changed."""

import jax
import numpy as np
from hypothesis import Phase, given, settings

import jaxlora
from tests.jaxlora.fuse.forms.form import random_array
from tests.jaxlora.fuse.forms.random_form import (
    FAULTS,
    arguments,
    make_function,
    recipes,
)
from tests.jaxlora.fuse.found import num_linears
from tests.oracle import assert_as_accurate_as

# Smaller failing cases are not searched for: each takes long to trace or compile.
OPTIONS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.generate],
}
TRACED = settings(max_examples=25, **OPTIONS)
COMPILED = settings(max_examples=6, **OPTIONS)
RECIPES = recipes()
FAULTY = recipes(FAULTS)


def with_gradients(recipe, **options):
    """Returns the leaves of the results and gradients, of both functions under jit."""
    function, args = make_function(recipe), arguments(recipe)

    def both(function, args):
        y, vjp = jax.vjp(function, *args)
        return y, vjp(jax.tree.map(lambda leaf: random_array("dy", leaf.shape), y))

    options_of_xla = {"xla_backend_optimization_level": 0}  # to compile faster
    run = jax.jit(both, static_argnums=0, compiler_options=options_of_xla)
    fused = jaxlora.fuse(function, implementation="xla", **options)
    leaves = [jax.tree.leaves(run(one, args)) for one in (fused, function)]
    return zip(*leaves, strict=True)


def num_found(recipe) -> int:
    explanation = jaxlora.explain(make_function(recipe), *arguments(recipe))
    return num_linears(explanation)


@TRACED
@given(recipe=RECIPES)
def test_the_branch_is_found(recipe):
    assert num_found(recipe) == 1


@TRACED
@given(recipe=FAULTY)
def test_no_branch_is_found_where_there_is_none(recipe):
    assert num_found(recipe) == 0


@COMPILED
@given(recipe=RECIPES)
def test_rewritten_equals_original(recipe):
    for actual, wanted in with_gradients(recipe, strict=True):
        assert_as_accurate_as(actual=actual, baseline=wanted, exact=wanted)


@COMPILED
@given(recipe=FAULTY)
def test_what_is_not_rewritten_keeps_its_bits(recipe):
    for actual, wanted in with_gradients(recipe):
        np.testing.assert_array_equal(actual, wanted)
