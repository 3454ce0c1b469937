"""Decides what is read of a record, and renders it as text with its targets."""
