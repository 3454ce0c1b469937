"""The optimizers of jobs: their table, and those that optax does not have."""
