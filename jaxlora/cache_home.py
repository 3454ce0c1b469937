"""The folder for files that a later run can use again, and that may be removed."""

import os
import pathlib


def cache_home() -> pathlib.Path:
    """Returns $XDG_CACHE_HOME/jaxlora, or ~/.cache/jaxlora if that is not set.

    Raises:
        RuntimeError: There is no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    home = pathlib.Path(cache) if cache else pathlib.Path.home() / ".cache"
    return home / "jaxlora"
