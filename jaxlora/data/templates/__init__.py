"""Chat templates, which run in child processes with limits."""
