"""Plans the microbatches of one window of global batches, and improves them."""
