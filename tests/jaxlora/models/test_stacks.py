"""Stacks of the tables of like linears."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.models.stacks import added, by_path, stacked_shapes

SHAPES = {
    "layers.0.mlp.up_proj.lora_a": (3, 8, 2),
    "layers.10.mlp.up_proj.lora_a": (3, 8, 2),
    "layers.2.mlp.up_proj.lora_a": (3, 8, 2),
    "layers.2.self_attn.q_proj.lora_a": (3, 4, 2),
}


def random(rng, shapes):
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def test_layers_lie_in_their_order_and_are_found_again():
    structs = {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in SHAPES.items()}
    shapes = {name: s.shape for name, s in stacked_shapes(structs).items()}
    assert shapes == {
        "layers.0,2,10.mlp.up_proj.lora_a": (3, 3, 8, 2),
        "layers.2.self_attn.q_proj.lora_a": (3, 1, 4, 2),
    }
    rng = np.random.default_rng(0)
    stacks, tables = random(rng, shapes), random(rng, SHAPES)
    before = by_path(stacks, axis=1)
    assert {path: table.shape for path, table in before.items()} == SHAPES
    up = stacks["layers.0,2,10.mlp.up_proj.lora_a"]
    np.testing.assert_array_equal(before["layers.10.mlp.up_proj.lora_a"], up[:, 2])
    after = by_path(added(*jax.tree.map(jnp.asarray, (stacks, tables))), axis=1)
    for path, table in after.items():
        np.testing.assert_allclose(table, before[path] + tables[path], rtol=1e-5)


def test_tables_of_a_slots_rows_are_views():
    rows = {"layers.1,3.mlp.up_proj.lora_b": np.zeros((2, 4, 5))}
    by_path(rows, axis=0)["layers.3.mlp.up_proj.lora_b"][:2] = 1
    assert rows["layers.1,3.mlp.up_proj.lora_b"].sum() == 2 * 5
