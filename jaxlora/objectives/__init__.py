"""Objectives, each of which defines a job's loss: one file each, and their table."""
