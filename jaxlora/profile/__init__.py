"""Measured times and memory of a model on the present device: `jaxlora profile`."""
