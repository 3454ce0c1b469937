"""In random functions, the branch is found where it is, and nothing else is changed."""

import jax
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


def programs(recipe, **options):
    """Returns the fused and the original program, with gradients; and arguments."""
    function, args = make_function(recipe), arguments(recipe)

    def both(function, args):
        y, vjp = jax.vjp(function, *args)
        return y, vjp(jax.tree.map(lambda leaf: random_array("dy", leaf.shape), y))

    options_of_xla = {"xla_backend_optimization_level": 0}  # to compile faster
    run = jax.jit(both, static_argnums=0, compiler_options=options_of_xla)
    fused = jaxlora.fuse(function, implementation="xla", **options)
    return [run.lower(one, args) for one in (fused, function)], args


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
    lowered, args = programs(recipe, strict=True)
    leaves = [jax.tree.leaves(one.compile()(args)) for one in lowered]
    for actual, wanted in zip(*leaves, strict=True):
        assert_as_accurate_as(actual=actual, baseline=wanted, exact=wanted)


@TRACED
@given(recipe=FAULTY)
def test_what_is_not_rewritten_keeps_its_bits(recipe):
    (actual, wanted), _ = programs(recipe)
    assert actual.as_text() == wanted.as_text()
