"""Stacks of the tables of like linears."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.stacks import Stack, added, stacked_shapes, to_paths

UP = "layers.{}.mlp.up_proj.lora_a"
STACKS = (
    Stack(name="mlp.up_proj.lora_a", paths=(UP.format(0), UP.format(2), UP.format(10))),
    Stack(name="self_attn.q_proj.lora_a", paths=("layers.2.self_attn.q_proj.lora_a",)),
)
SHAPES = {path: (3, 8, 2) for path in STACKS[0].paths} | {
    path: (3, 4, 2) for path in STACKS[1].paths
}


def random(rng, shapes):
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def test_tables_are_found_by_path():
    structs = {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in SHAPES.items()}
    shapes = {name: s.shape for name, s in stacked_shapes(STACKS, structs).items()}
    assert shapes == {
        "mlp.up_proj.lora_a": (3, 3, 8, 2),
        "self_attn.q_proj.lora_a": (3, 1, 4, 2),
    }
    rng = np.random.default_rng(0)
    arrays, tables = random(rng, shapes), random(rng, SHAPES)
    before = to_paths(STACKS, arrays, axis=1)
    assert {path: table.shape for path, table in before.items()} == SHAPES
    up = arrays["mlp.up_proj.lora_a"]
    np.testing.assert_array_equal(before[UP.format(10)], up[:, 2])
    sums = added(STACKS, *jax.tree.map(jnp.asarray, (arrays, tables)))
    for path, table in to_paths(STACKS, sums, axis=1).items():
        np.testing.assert_allclose(table, before[path] + tables[path], rtol=1e-5)


def test_tables_of_a_slots_rows_are_views():
    rows = {"mlp.up_proj.lora_a": np.zeros((3, 8, 2))}
    to_paths(STACKS[:1], rows, axis=0)[UP.format(2)][:, :1] = 1
    assert rows["mlp.up_proj.lora_a"].sum() == 8


def test_an_empty_stack_is_refused():
    with pytest.raises(ValueError, match="stack 'x' has no tables"):
        Stack(name="x", paths=())
