"""Packs the global batches of jobs into microbatches, and improves the plan."""
