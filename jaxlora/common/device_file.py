"""Files of a kind of device in the user's cache, which this user alone may write."""

import logging
import os
import pathlib
import re
from collections.abc import Callable

from jaxlora.common.cache_home import cache_home, check_private
from jaxlora.common.json_file import cut, open_regular_file

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**20


def device_path(folder: str, device_kind: str) -> pathlib.Path:
    """Returns the path of a device's file in a folder of the user's cache.

    Raises:
        RuntimeError: There is no home folder.
    """
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") or "unnamed"
    return cache_home() / folder / f"{name}.json"


def read_private(
    path: pathlib.Path, what: str, check: Callable[[str], object]
) -> str | None:
    """Reads a file; None, with a line in the log, if it cannot be used.

    Only a file of this user, in a folder of this user, is read.

    Args:
        path: The file.
        what: What it holds, for the log.
        check: Raises ValueError if the text is not as it should be.
    """
    try:
        check_private(path.parent.stat(), path.parent)
        with open_regular_file(path, follow=False) as file:
            check_private(os.fstat(file.fileno()), path)
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        text = data.decode()
        check(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or cut(error)
        logger.warning("%s: %s is not used: %s", what, path, why)
        return None
    return text
