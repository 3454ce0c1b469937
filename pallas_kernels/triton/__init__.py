"""Fused kernels for NVIDIA GPUs from Ampere on, written with Triton."""
