"""Written forms of LoRA that must be found, and near misses that must not."""
