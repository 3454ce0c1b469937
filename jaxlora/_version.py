"""The installed version. It is imported first, so a bare checkout fails clearly."""

import importlib.metadata
import pathlib
import sys

if sys.platform == "win32":
    raise ImportError(
        "jaxlora does not run on Windows itself: it locks and syncs files as Linux "
        "does, and JAX has no GPU support there. Install it in WSL 2 (`wsl --install`)."
    )

try:
    __version__ = importlib.metadata.version("jaxlora")
except importlib.metadata.PackageNotFoundError:
    raise ImportError(
        "jaxlora is not installed, only its source is here: run `pip install -e .` in "
        f"{pathlib.Path(__file__).parents[1]}.",
        name="jaxlora",  # `python -m jaxlora` then prints the message alone
    ) from None
