"""The `xla` back end: plain JAX, on any device."""
