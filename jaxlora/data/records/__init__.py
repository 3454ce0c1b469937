"""Reads records from files and data sets, and checks their messages."""
