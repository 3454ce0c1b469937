"""The tests; how annotations are checked while they run is in checks.py."""
