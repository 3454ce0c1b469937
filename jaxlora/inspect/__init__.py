"""`jaxlora inspect`: describes a file, a folder or this machine."""

from jaxlora.inspect.artifacts import inspect_path

__all__ = ["inspect_path"]
