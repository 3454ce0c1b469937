"""Seeded random functions with something like a LoRA linear, and their reference."""
