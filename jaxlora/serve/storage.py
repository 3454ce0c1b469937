"""The storage of checkpoints and of files that tenants upload."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

from jaxlora.errors import ConfigError


class Storage:
    """Files and folders by key. One that is there never changes.

    A key has parts divided by `/`, the first of which is the tenant.
    """

    def __init__(self, root: pathlib.Path):
        """Uses a folder, which is made if it is not there."""
        self._root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[pathlib.Path]:
        """Gives a path to write a file or folder at, which then is there by its key.

        Raises:
            ConfigError: There is something by this key.
        """
        path = self._root / key
        if path.exists():
            raise ConfigError(f"{key} is there already. Choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.writing")
        try:
            yield temporary
            temporary.rename(path)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)

    def fetch(self, key: str) -> pathlib.Path:
        """Returns the path of what is there by a key.

        Raises:
            ConfigError: Nothing is.
        """
        path = self._root / key
        if not path.exists():
            raise ConfigError(f"there is no {key}.")
        return path

    def delete(self, key: str) -> None:
        """Deletes what is there by a key, if anything is."""
        path = self._root / key
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
