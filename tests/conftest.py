"""Settings of every test."""

import jax

# On a GPU, float32 products would otherwise run in tf32.
jax.config.update("jax_default_matmul_precision", "highest")
