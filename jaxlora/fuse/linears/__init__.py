"""Finds the frozen linears with low-rank branches in a traced function."""
