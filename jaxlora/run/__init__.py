"""A run as its files and its callbacks know it: events, status, and the folder."""
