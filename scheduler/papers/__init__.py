"""Packers that plan a whole run: the default one, baselines, and those of papers."""
