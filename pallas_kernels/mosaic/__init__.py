"""Fused LoRA kernels for Hopper, written with Pallas Mosaic GPU."""
