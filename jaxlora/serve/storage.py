"""The storage of checkpoints and uploads: a local folder, or an object store."""

import contextlib
import datetime
import hashlib
import hmac
import json
import os
import pathlib
import re
import secrets
import shutil
import tarfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import obstore
import obstore.exceptions
import obstore.store

from jaxlora.common.atomic import make_folder, sync_folder
from jaxlora.common.file_lock import file_lock
from jaxlora.errors import ConfigError, JaxloraError, StorageError

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_MOST_KEY = 900
_CHUNK = 2**20
# Local: what is being written or deleted lies in this folder until it gets its name.
_WRITING, _LOCK = ".writing", ".lock"
# Object stores: a thing's objects lie under a random name that begins with `@`. It is
# there when this object is, which names the others.
_COMMIT = "@complete"
# Objects that nothing has committed for so long were left by a crash.
_STALE_SECONDS = 86_400.0
# A fetched copy is not removed for so long, as somebody may be about to read it.
_FRESH_SECONDS = 600.0


class NotStored(ConfigError):
    """The storage has nothing by a key."""


class Storage:
    """Files and folders by key. One that is there never changes.

    A key has parts divided by `/`, the first of which is the tenant. Something is there
    as a whole or not at all, also after a crash. Any thread may use it.
    """

    def __init__(
        self,
        url: str | pathlib.Path,
        *,
        options: Mapping[str, Any] | None = None,
        cache: pathlib.Path | None = None,
        cache_bytes: int = 20 * 2**30,
        writer: str = "0",
    ):
        """Opens a storage.

        Args:
            url: A folder, `file:///PATH`, or an object store: `s3://BUCKET/PREFIX`,
                `gs://BUCKET/PREFIX`, `az://ACCOUNT/CONTAINER/PREFIX`, `memory:///`.
            options: Settings of the object store, as obstore has them. What is left out
                comes from its usual variables of the environment.
            cache: Folder for copies of what an object store has.
            cache_bytes: Bytes of such copies, above which old ones are removed.
            writer: Name of this process among those that use a folder at the same time.

        Raises:
            ConfigError: The URL or an option cannot be used.
            StorageError: The folder cannot be written.
        """
        self._place: _Folder | _Bucket
        if isinstance(url, pathlib.Path) or url.startswith("file://"):
            self._place = _Folder(_path_of(url), writer)
            return
        if cache is None:
            raise ConfigError(f"storage={url!r:.200} needs a folder for copies.")
        self._place = _Bucket(_open_store(url, options or {}), cache, cache_bytes)

    @contextlib.contextmanager
    def writing(self, key: str) -> Generator[pathlib.Path]:
        """Gives a path to write a file or folder at, which then is there by its key.

        Raises:
            ConfigError: There is something by this key, or it is no key.
            StorageError: It cannot be written, and nothing is there.
        """
        with self._place.writing(_checked(key)) as path:
            yield path

    def fetch(self, key: str) -> pathlib.Path:
        """Returns a local path of what is there by a key, which is not to be changed.

        Raises:
            NotStored: Nothing is.
            ConfigError: It is no key.
            StorageError: It cannot be read.
        """
        return self._place.fetch(_checked(key))

    def has(self, key: str) -> bool:
        """Whether anything is there by a key.

        Raises:
            JaxloraError: As for `fetch`, but for `NotStored`.
        """
        try:
            return bool(self.files(key))
        except NotStored:
            return False

    def files(self, key: str) -> dict[str, int]:
        """Returns the bytes of each file, by its path below a key.

        A key of a file has one, whose path is the last part of the key.

        Raises:
            NotStored: Nothing is there.
            ConfigError: It is no key.
        """
        return self._place.files(_checked(key))

    def size(self, key: str) -> int:
        """Returns the bytes of what is there by a key.

        Raises:
            JaxloraError: As for `files`.
        """
        return sum(self.files(key).values())

    def list(self, prefix: str) -> dict[str, int]:
        """Returns the bytes of each file whose key begins with the parts of a prefix.

        A file in a folder has the key of the folder, and its path.
        """
        return self._place.list(_checked(prefix))

    def read(self, key: str, name: str) -> Iterator[bytes]:
        """Reads a file in pieces of about a mebibyte.

        Args:
            key: A key.
            name: One of its `files`.

        Raises:
            NotStored: There is no such file.
        """
        if name not in self.files(key):
            raise NotStored(f"there is no {name!r:.200} in {key}.")
        return self._place.read(key, name)

    def archive(self, key: str) -> tuple[int, Iterator[bytes]]:
        """Returns the size of a tar of what is there by a key, and its pieces.

        Neither the memory nor the disk ever holds the whole.

        Raises:
            NotStored: Nothing is there.
        """
        files = self.files(key)
        folder = key.rpartition("/")[2]
        names = {
            name: name if [*files] == [folder] else f"{folder}/{name}" for name in files
        }
        headers = {name: _tar_header(names[name], size) for name, size in files.items()}
        length = sum(map(len, headers.values())) + 2 * tarfile.BLOCKSIZE
        length += sum(size + _padding(size) for size in files.values())

        def pieces() -> Iterator[bytes]:
            for name, header in headers.items():
                yield header
                yield from self._place.read(key, name)
                yield bytes(_padding(files[name]))
            yield bytes(2 * tarfile.BLOCKSIZE)

        return length, pieces()

    def signed_urls(self, key: str, seconds: float) -> dict[str, str] | None:
        """Returns an address for each file that anyone can download it from.

        Args:
            key: A key.
            seconds: How long the addresses are valid.

        Returns:
            The addresses by path; None: this storage has none, see `Links`.

        Raises:
            NotStored: Nothing is there.
        """
        return self._place.signed_urls(_checked(key), seconds)

    def delete(self, key: str) -> None:
        """Deletes what is there by a key or below it, if anything is."""
        self._place.delete(_checked(key))

    def clean(self) -> None:
        """Removes what crashes of this writer have left half-written."""
        self._place.clean()


def _checked(key: str) -> str:
    """Returns a key whose parts can be names of files and of objects."""
    if len(key) > _MOST_KEY or not all(map(_PART.fullmatch, key.split("/"))):
        raise ConfigError(
            f"{key!r:.200} is no key: its parts have 1 to 200 letters, digits, '.', "
            "'_', ':' and '-', and begin with a letter or digit."
        )
    return key


def _taken(key: str) -> ConfigError:
    return ConfigError(f"{key} is there already. Choose another name.")


def _missing(key: str) -> NotStored:
    return NotStored(f"there is no {key}.")


def _path_of(url: str | pathlib.Path) -> pathlib.Path:
    if isinstance(url, pathlib.Path):
        return url
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise ConfigError(
            f"storage={url!r:.200} names no folder of this machine. Write "
            "file:///PATH, with three slashes."
        )
    return pathlib.Path(path)


def _tar_header(name: str, num_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = num_bytes, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(num_bytes: int) -> int:
    return -num_bytes % tarfile.BLOCKSIZE


# ---- a folder ------------------------------------------------------------------------


class _Folder:
    """Keys are paths in a folder, and get there by a rename."""

    def __init__(self, root: pathlib.Path, writer: str):
        self._root, self._writing = root, root / _WRITING
        self._writer = f"{writer}-"
        self._mark = self._writer + secrets.token_hex(4)  # of what this object writes
        with _folder_errors(str(root)):
            make_folder(root)
            root.chmod(0o700)

    @contextlib.contextmanager
    def writing(self, key: str) -> Generator[pathlib.Path]:
        if os.path.lexists(self._root / key):
            raise _taken(key)
        place = self._temporary()
        try:
            with _folder_errors(key):
                place.parent.mkdir(parents=True)
            yield place
            with _folder_errors(key):
                self._commit(key, place)
        finally:
            shutil.rmtree(place.parent, ignore_errors=True)

    def _commit(self, key: str, place: pathlib.Path) -> None:
        path = self._root / key
        inside = [place, *place.rglob("*")]
        for file in inside:
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        for folder in inside:
            if folder.is_dir():
                sync_folder(folder)
        with self._turn():
            if os.path.lexists(path):
                raise _taken(key)
            make_folder(path.parent)
            place.rename(path)
            sync_folder(path.parent)

    def fetch(self, key: str) -> pathlib.Path:
        path = self._root / key
        if not path.exists():
            raise _missing(key)
        return path

    def files(self, key: str) -> dict[str, int]:
        path = self.fetch(key)
        try:
            if path.is_file():
                return {path.name: path.stat().st_size}
            return {str(p.relative_to(path)): p.stat().st_size for p in _files_of(path)}
        except FileNotFoundError:  # another thread has deleted it
            raise _missing(key) from None

    def list(self, prefix: str) -> dict[str, int]:
        path = self._root / prefix
        found = [path] if path.is_file() else _files_of(path)
        return {str(p.relative_to(self._root)): p.stat().st_size for p in found}

    def read(self, key: str, name: str) -> Iterator[bytes]:
        path = self._root / key
        with (path if path.is_file() else path / name).open("rb") as file:
            while piece := file.read(_CHUNK):
                yield piece

    def signed_urls(self, key: str, seconds: float) -> None:
        self.fetch(key)

    def delete(self, key: str) -> None:
        path = self._root / key
        if not os.path.lexists(path):
            return
        place = self._temporary()
        with _folder_errors(key):
            place.parent.mkdir(parents=True)
            with self._turn(), contextlib.suppress(FileNotFoundError):
                path.rename(place)  # unless somebody else was first
                sync_folder(path.parent)
                self._remove_empty(path.parent)
        shutil.rmtree(place.parent, ignore_errors=True)

    def _remove_empty(self, folder: pathlib.Path) -> None:
        """Removes a folder and those that it is in, as far as they are empty."""
        with contextlib.suppress(OSError):  # it has something
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def clean(self) -> None:
        for place in self._writing.glob(f"{self._writer}*"):
            if not place.name.startswith(self._mark):
                shutil.rmtree(place, ignore_errors=True)

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Keeps other threads and processes from changing names meanwhile."""
        return file_lock(self._root / _LOCK)

    def _temporary(self) -> pathlib.Path:
        return self._writing / f"{self._mark}{secrets.token_hex(8)}" / "new"


@contextlib.contextmanager
def _folder_errors(what: str) -> Generator[None]:
    try:
        yield
    except JaxloraError:
        raise
    except OSError as error:
        raise StorageError(
            f"{what} cannot be written: {error.strerror}. Nothing was changed. Free "
            "space or fix the permissions, then try again."
        ) from error


def _files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# ---- an object store -----------------------------------------------------------------


def _open_store(url: str, options: Mapping[str, Any]) -> Any:
    try:
        return obstore.store.from_url(url, **options)
    except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"storage={url!r:.200} cannot be opened: {_reason(error)}. Set a URL such "
            "as s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER or "
            "file:///PATH, and storage_options as obstore has them."
        ) from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(" Debug source")[0]
    return text[:300].rstrip(".")


@contextlib.contextmanager
def _store_errors(what: str) -> Generator[None]:
    try:
        yield
    except obstore.exceptions.BaseError as error:
        raise StorageError(
            f"{what}: the storage has failed: {_reason(error)}. Nothing was changed; "
            "try again, or look after the storage."
        ) from error


class _Bucket:
    """Objects of a thing lie under a random name, until one more object commits them.

    So nothing replaces anything, whoever else writes, and a crash leaves nothing that
    can be seen. Only the small object that commits is written conditionally, so large
    ones can be sent in parts.
    """

    def __init__(self, store: Any, cache: pathlib.Path, cache_bytes: int):
        self._store, self._cache, self._cache_bytes = store, cache, cache_bytes
        self._lock = threading.Lock()
        shutil.rmtree(cache / _WRITING, ignore_errors=True)

    @contextlib.contextmanager
    def writing(self, key: str) -> Generator[pathlib.Path]:
        if self._commit_of(key) is not None:
            raise _taken(key)
        place = self._cache / _WRITING / secrets.token_hex(8) / "new"
        place.parent.mkdir(parents=True)
        try:
            yield place
            with _store_errors(key):
                self._upload(key, place)
        finally:
            shutil.rmtree(place.parent, ignore_errors=True)

    def _upload(self, key: str, place: pathlib.Path) -> None:
        is_file = place.is_file()
        name = key.rpartition("/")[2]
        paths = (
            {name: place}
            if is_file
            else {str(path.relative_to(place)): path for path in _files_of(place)}
        )
        folder = f"@{secrets.token_hex(8)}"
        try:
            for name, path in paths.items():
                obstore.put(self._store, f"{key}/{folder}/{name}", path)
            sizes = {name: path.stat().st_size for name, path in paths.items()}
            commit = {"folder": folder, "is_file": is_file, "files": sizes}
            data = json.dumps(commit).encode()
            obstore.put(self._store, f"{key}/{_COMMIT}", data, mode="create")
        except BaseException as error:
            with contextlib.suppress(obstore.exceptions.BaseError, FileNotFoundError):
                obstore.delete(self._store, [f"{key}/{folder}/{n}" for n in paths])
            if isinstance(error, obstore.exceptions.AlreadyExistsError):
                raise _taken(key) from None
            raise

    def fetch(self, key: str) -> pathlib.Path:
        commit = self._committed(key)
        path = self._cache / key / commit["folder"]
        name = key.rpartition("/")[2]
        with self._lock:
            if not path.exists():
                place = self._cache / _WRITING / secrets.token_hex(8)
                with _folder_errors(key), _store_errors(key):
                    self._download(key, commit, place)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    place.rename(path)
            os.utime(path)
            self._trim()
        return path / name if commit["is_file"] else path

    def _download(self, key: str, commit: Any, place: pathlib.Path) -> None:
        for name in commit["files"]:
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                for piece in self._pieces(key, commit, name):
                    file.write(piece)

    def _trim(self) -> None:
        """Removes the copies that were fetched first while there are too many bytes."""
        copies = [path for path in self._cache.rglob("@*") if path.is_dir()]
        copies.sort(key=lambda path: path.stat().st_mtime)
        sizes = {c: sum(p.stat().st_size for p in _files_of(c)) for c in copies}
        total = sum(sizes.values())
        for path, num_bytes in sizes.items():
            is_fresh = time.time() - path.stat().st_mtime < _FRESH_SECONDS
            if total <= self._cache_bytes or is_fresh:
                return
            shutil.rmtree(path, ignore_errors=True)
            total -= num_bytes

    def files(self, key: str) -> dict[str, int]:
        return self._committed(key)["files"]

    def list(self, prefix: str) -> dict[str, int]:
        out: dict[str, int] = {}
        for path in self._objects(prefix):
            key, slash, name = path.rpartition("/")
            if slash and name == _COMMIT and (commit := self._commit_of(key)):
                is_file = commit["is_file"]
                for file, num_bytes in commit["files"].items():
                    out[key if is_file else f"{key}/{file}"] = num_bytes
        return out

    def read(self, key: str, name: str) -> Iterator[bytes]:
        return self._pieces(key, self._committed(key), name)

    def _pieces(self, key: str, commit: Any, name: str) -> Iterator[bytes]:
        with _store_errors(key):
            found = obstore.get(self._store, f"{key}/{commit['folder']}/{name}")
            for piece in found.stream(min_chunk_size=_CHUNK):
                yield bytes(piece)

    def signed_urls(self, key: str, seconds: float) -> dict[str, str] | None:
        commit = self._committed(key)
        signers = (
            obstore.store.S3Store,
            obstore.store.GCSStore,
            obstore.store.AzureStore,
        )
        if not isinstance(self._store, signers):
            return None
        names = [*commit["files"]]
        paths = [f"{key}/{commit['folder']}/{name}" for name in names]
        until = datetime.timedelta(seconds=seconds)
        with _store_errors(key):
            urls = obstore.sign(self._store, "GET", paths, until)
        return dict(zip(names, urls, strict=True))

    def delete(self, key: str) -> None:
        with _store_errors(key):
            paths = self._objects(key)
            # Without the objects that commit, the others cannot be seen.
            for path in sorted(paths, key=lambda p: not p.endswith(f"/{_COMMIT}")):
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, path)
        with self._lock:  # `_trim` looks at all copies
            shutil.rmtree(self._cache / key, ignore_errors=True)

    def clean(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        with _store_errors("what was left half-written"):
            objects = self._objects(None)
            committed = {p.rpartition("/")[0] for p in objects if p.endswith(_COMMIT)}
            for path, modified in objects.items():
                key, is_data, rest = path.partition("/@")
                folder = "@" + rest.partition("/")[0]
                if not is_data or folder == _COMMIT:
                    continue
                if (now - modified).total_seconds() < _STALE_SECONDS:
                    continue
                commit = self._commit_of(key) if key in committed else None
                if commit is None or commit["folder"] != folder:
                    obstore.delete(self._store, path)

    def _objects(self, prefix: str | None) -> dict[str, datetime.datetime]:
        found = obstore.list(self._store, prefix)
        return {o["path"]: o["last_modified"] for some in found for o in some}

    def _commit_of(self, key: str) -> Any:
        """Returns what commits a thing; None: nothing does."""
        with _store_errors(key):
            try:
                found = obstore.get(self._store, f"{key}/{_COMMIT}")
                return json.loads(bytes(found.bytes()))
            except FileNotFoundError:
                return None

    def _committed(self, key: str) -> Any:
        if (commit := self._commit_of(key)) is None:
            raise _missing(key)
        return commit


# ---- links ---------------------------------------------------------------------------


class LinkError(JaxloraError):
    """A link for a download was changed, or its time is over."""


class Links:
    """Signs links by which anyone can download what is in the storage for a while."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time):
        """Makes the object.

        Args:
            secret: Random bits, which are the same ones as long as links are valid.
            clock: Returns Unix seconds.
        """
        self._secret, self._clock = secret, clock

    def path(self, key: str, seconds: float, *, file: str | None = None) -> str:
        """Returns the path and query of a link.

        Args:
            key: What to download.
            seconds: How long the link is valid.
            file: The file of a folder; None: a tar of the whole.
        """
        until = int(self._clock() + seconds)
        query = {"expires": str(until), "signature": self._sign(key, file, until)}
        if file is not None:
            query["file"] = file
        return f"/download/{urllib.parse.quote(key)}?{urllib.parse.urlencode(query)}"

    def check(self, key: str, file: str | None, expires: int, signature: str) -> None:
        """Checks the parts of a link.

        Raises:
            LinkError: It was changed, or its time is over.
        """
        expected = self._sign(key, file, expires).encode()
        if not hmac.compare_digest(expected, signature.encode(errors="replace")):
            raise LinkError("this link is damaged. Ask the server for another one.")
        if self._clock() >= expires:
            raise LinkError("this link has expired. Ask the server for another one.")

    def _sign(self, key: str, file: str | None, expires: int) -> str:
        text = json.dumps([key, file, expires]).encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()
