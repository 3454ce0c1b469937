"""Benchmarks: `python -m scripts.bench SUBJECT`."""
