"""The terminal that log lines and progress bars share, so that neither tears."""

from rich.console import Console

stderr = Console(stderr=True)
