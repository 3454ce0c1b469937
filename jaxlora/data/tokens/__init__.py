"""Turns records into tokens, and keeps them."""
