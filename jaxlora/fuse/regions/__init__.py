"""Regions: linears with the row-wise functions around them, and how to compute each."""
