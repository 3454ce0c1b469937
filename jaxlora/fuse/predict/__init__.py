"""Predicts the time of a function's kernels on a GPU, as it is and fused."""
