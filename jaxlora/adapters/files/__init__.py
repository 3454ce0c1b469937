"""Adapters in and out: PEFT folders, GGUF files and merged models."""
