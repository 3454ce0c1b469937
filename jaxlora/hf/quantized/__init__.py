"""Quantized checkpoints of the hub: their config.json, and how they store linears."""
