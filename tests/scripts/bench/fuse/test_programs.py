"""The benchmark's programs are found by the fusion pass, and keep their values."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxlora
from jaxlora.bench.fuse import benchmark
from jaxlora.bench.fuse.programs import adapters, layer, linear


def abstract(make):
    """A program whose arrays have no values."""
    made = []

    def arguments():
        made.append(make())
        return made[0].arguments

    trained, *others = jax.eval_shape(arguments)
    return dataclasses.replace(made[0], trained=trained, others=tuple(others))


def relative_error(got, want):
    got, want = (np.asarray(v, np.float32) for v in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("make", [linear, adapters])
def test_linears_keep_their_values_and_gradients(make):
    program = jax.jit(lambda: make("small", rate=0.1, tokens=128, width=64).arguments)()
    trained, *others = program
    shapes = abstract(lambda: make("small", rate=0.1, tokens=128, width=64))
    program = dataclasses.replace(shapes, trained=trained, others=tuple(others))
    arguments = program.step_arguments()
    results = [run(*arguments) for run in benchmark.steps(program).values()]
    for want, got in zip(*map(jax.tree.leaves, results), strict=True):
        assert relative_error(got, want) < 0.02


def test_the_linears_of_a_layer_are_found():
    program = abstract(lambda: layer("a layer", rate=0.1))
    explained = jaxlora.explain(program.function, *program.arguments)
    found = [n for site in explained.sites for n in site.shape.out_features]
    assert {*found} == {1024, 4096, 14336} and len(found) >= 6
    assert all(site.shape.draws_masks for site in explained.sites)


def test_a_prediction_is_of_both_passes():
    program = abstract(lambda: linear("a linear", rate=0.1))
    predicted = benchmark.predict(program)
    forward = jaxlora.explain(program.function, *program.arguments).before
    assert predicted.sites == 1
    assert predicted.original.seconds > 1.5 * forward.seconds
