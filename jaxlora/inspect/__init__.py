"""What a file, a folder or this machine holds: `jaxlora inspect`."""

from jaxlora.inspect.artifacts import inspect_path

__all__ = ["inspect_path"]
