"""Benchmarks: `jaxlora bench SUBJECT`."""
