"""The benchmark's programs are found by the fusion pass, and keep their values."""

import argparse
import dataclasses

import jax
import numpy as np
import pytest

import jaxlora
from scripts.bench.fuse import benchmark
from scripts.bench.fuse.own import own_layers
from scripts.bench.fuse.programs import (
    PROGRAMS,
    Shape,
    Sizes,
    abstract,
    adapters,
    linear,
)

TINY = Sizes(
    tokens=128, sequence=64, width=64, heads=4, kv_heads=2, head_width=16, hidden=96
)


def relative_error(got, want):
    got, want = (np.asarray(v, np.float32) for v in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("make", [linear, adapters])
def test_linears_keep_their_values_and_gradients(make):
    program = jax.jit(lambda: make("small", rate=0.1, tokens=128, width=64).arguments)()
    trained, *others = program
    shapes = abstract(lambda: make("small", rate=0.1, tokens=128, width=64))
    program = dataclasses.replace(shapes, trained=trained, others=tuple(others))
    results = []
    for way in (benchmark.ORIGINAL, benchmark.FUSED):
        run, leaves = benchmark.flat_step(benchmark.replaced(program, way))
        results.append(run(*leaves))
    for want, got in zip(*results, strict=True):
        assert relative_error(got, want) < 0.02


def test_the_linears_of_a_layer_are_found():
    program = abstract(PROGRAMS["layer"])
    explained = jaxlora.explain(program.function, *program.arguments)
    found = [n for site in explained.sites for n in site.shape.out_features]
    assert {*found} == {1024, 4096, 14336} and len(found) >= 6
    assert all(site.shape.draws_masks for site in explained.sites)


def test_own_layers_have_the_sizes_of_the_program():
    shape = Shape("a layer", 0.1, 1, TINY)
    own, plain = abstract(lambda: own_layers(shape)), abstract(shape)
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert size(own.trained) == size(plain.trained)
    assert size(own.others[0]) == size(plain.others[0])
    # The plain program has one norm for both halves of a layer.
    assert size(own.others[1]) == size(plain.others[1]) + TINY.width
    (y, (adapters, x)) = jax.eval_shape(own.step(own.function), *step_shapes(own))
    assert y.shape == x.shape == (TINY.tokens, TINY.width)
    assert jax.tree.map(np.shape, adapters) == jax.tree.map(np.shape, own.trained)


def step_shapes(program):
    return jax.eval_shape(program.step_arguments)


def test_the_pass_is_timed_without_weights():
    row = benchmark.pass_row(2)
    assert row["layers"] == 2 and 0 < row["pass_seconds"] < 60
    assert benchmark.tables([row]).splitlines()[-1].startswith("| decoder, unrolled |")


def test_ways_are_timed_in_order_and_then_in_turns(monkeypatch):
    monkeypatch.setitem(PROGRAMS, "tiny", Shape("tiny", 0.1, 1, TINY))
    seen = []

    def measure_calls(run, arguments, repeats):
        seen.append(len(arguments))
        return [[("dot", float(len(seen))), ("fusion", 1.0)]] * repeats

    monkeypatch.setattr(benchmark, "measure_calls", measure_calls)
    compiled = jax.jit(lambda: 0).lower().compile()
    monkeypatch.setattr(benchmark, "compile_program", lambda lowered: compiled)
    # XLA's options for GPUs are unknown on a CPU.
    monkeypatch.setattr(benchmark, "own_layers", lambda _: abstract(PROGRAMS["tiny"]))
    args = argparse.Namespace(
        ways=(benchmark.ORIGINAL, benchmark.OWN), measure_seconds=None, output_dir=None,
        repeats=1, rounds=3,
    )  # fmt: skip
    rows = [*benchmark.time_program("tiny", args)]
    assert [row["way"] for row in rows] == ["own", "original"] * 2
    # In turns, products take 1, 3 and 5 us of the one, and 2, 4 and 6 of the other.
    assert [row["us"] for row in rows] == [2.0, 3.0, 4.0, 5.0]
    text = benchmark.tables(rows)
    assert "| 4.0 | 1.25 | 1.0 | 1.0 |" in text
    assert "| XLA's products | 3.0 | 4.0 |" in text
