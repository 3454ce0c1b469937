"""The code of the page on your own Flax model runs as it is written."""

import jax
import jax.numpy as jnp

from tests.docs import pages


def test_the_layer_runs_as_written():
    page = pages.DOCS / "howto" / "own_flax_model.md"
    code, _ = pages.code_blocks(page, "python")
    keys = jax.random.split(jax.random.key(0), 4)
    names = {
        "frozen_kernel": jax.random.normal(keys[0], (512, 1024), jnp.bfloat16),
        "a": jax.random.normal(keys[1], (512, 4)),
        "b": jax.random.normal(keys[2], (4, 1024)),
        "x": jax.random.normal(keys[3], (256, 512), jnp.bfloat16),
    }
    exec(code, names)
    y = names["y"].reshape(4, 64, 1024)
    frozen = (names["x"] @ names["frozen_kernel"]).reshape(4, 64, 1024)
    assert (y[1] == frozen[1]).all()  # an empty slot
    assert (y[2] == 0).all()
    assert (y[0] != frozen[0]).any()
