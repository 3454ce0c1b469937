"""Finds low-rank branches in any JAX function and runs them in the fused kernels."""
