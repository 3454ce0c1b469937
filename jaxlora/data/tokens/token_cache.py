"""Keeps the tokens of data sets on disk, so that later runs need not make them again.

An entry is a safetensors file with a checksum. Its name is a hash of everything that
determines the tokens: the bytes of the data, the settings, the tokenizer with its chat
template, the versions of libraries, and the source code of this package. Entries are
written under a temporary name and renamed, so several processes may read and write them
at the same time. Only entries that nobody but this user may have written are used.
"""

import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import safetensors
import tokenizers
import xxhash

from jaxlora.common import atomic
from jaxlora.common.cache_home import (
    cache_home,
    check_private,
    make_private,
    open_private,
    remove_oldest,
)
from jaxlora.config import DataConfig
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.dataset import COLUMNS, TOKENS_IN_MEMORY, EncodedRecords
from jaxlora.errors import StorageError

_log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_MAX_BYTES = 10 * 2**30
_NAMES = {"l": "I64", "d": "F64", "i": "I32", "f": "F32", "?": "BOOL"}
# Where the data and the chat template lie does not affect the tokens.
_PLACES = {"path", "split", "subset", "revision", "chat_template"}
_CLOCK = re.compile(
    r"strftime_now\s*(?:is\s+defined|\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\))"
)


def cache_key(
    data: DataConfig, content_hash: str, tokenizer: Tokenizer, max_length: int
) -> str:
    """Returns a hash of everything that determines the tokens of a data set.

    Args:
        data: Settings of the data set.
        content_hash: Hash of its stored bytes.
        tokenizer: The tokenizer, with its chat template.
        max_length: Number of first tokens of each record that are needed.
    """
    inputs = {
        "data": data.model_dump(mode="json", exclude=_PLACES),
        "suffix": Path(data.path).suffix,
        "content": content_hash,
        "tokenizer": tokenizer.fingerprint,
        "clock": _clock(tokenizer),
        "max_length": max_length,
        "versions": [tokenizers.__version__, _jinja_version(), pyarrow.__version__],
        "code": _code_hash(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _jinja_version() -> str:
    """Returns the version of Jinja without importing it; no template runs here."""
    return importlib.metadata.version("jinja2")


def _clock(tokenizer: Tokenizer) -> list[str]:
    """Returns what the chat templates can see of the time.

    Most templates see no time or only the date, so their tokens stay valid longer.
    """
    now, seen = tokenizer.chat.now, []
    for source in tokenizer.chat.sources:
        formats = [one or other for one, other in _CLOCK.findall(source)]
        seen += [now.strftime(form) for form in formats if form]
        if "strftime_now" in _CLOCK.sub("", source):
            seen.append(now.isoformat())
    return seen


@functools.cache
def _code_hash() -> str:
    """Hashes the modules of `jaxlora.data`, which turn records into tokens."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class TokenCache:
    """A folder of entries; the ones that were not used for longest are removed.

    No method raises an error about the folder: a run can do without a cache. What
    fails is logged.
    """

    def __init__(self, folder: Path, max_bytes: int = _MAX_BYTES):
        """Makes a cache.

        Args:
            folder: Its folder, which need not exist.
            max_bytes: Size above which entries are removed.
        """
        self._folder = folder
        self._max_bytes = max_bytes

    def load(self, key: str, path: str) -> EncodedRecords | None:
        """Returns an entry; None if there is none, or if it cannot be used.

        Args:
            key: The entry's name, from `cache_key`.
            path: Path of the data, for the log.
        """
        entry = self._entry(key)
        try:
            check_private(self._folder.stat(), self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", error)
            return None
        try:
            records = _read(entry)  # which runs no code of the file
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            text = "%s: these kept tokens cannot be used (%s), so they are made again."
            _log.warning(text, entry, why)
            return None
        _log.info("%s: its tokens are taken from %s", path, self._folder)
        return records

    def store(self, key: str, records: EncodedRecords) -> None:
        """Adds an entry, and removes old ones if there are too many."""
        try:
            make_private(self._folder)
            atomic.remove_leftovers(self._folder)
            with atomic.new_file(self._entry(key), mode=0o600) as file:
                for part in _format(records):
                    file.write(part)
            remove_oldest(self._folder, _SUFFIX, self._max_bytes, keep=self._entry(key))
        except (OSError, StorageError) as error:
            self._warn("written", error)

    def _entry(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _warn(self, what: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else None
        _log.warning(
            "kept tokens cannot be %s in %s (%s). The next run makes them again. Set "
            "XDG_CACHE_HOME to another folder, or token_cache to false.",
            what,
            self._folder,
            reason or error,
        )


def user_token_cache() -> TokenCache | None:
    """Returns the user's cache; None, and a line in the log, if there is no home."""
    try:
        return TokenCache(cache_home() / "tokens")
    except RuntimeError:
        _log.info("tokens are not kept on disk: there is no home folder")
        return None


def _format(records: EncodedRecords) -> Iterator[bytes | memoryview]:
    """Yields the bytes of an entry, which may be more than the memory holds."""
    arrays = {
        name: np.ascontiguousarray(getattr(records, name), dtype)
        for name, dtype in COLUMNS.items()
    }
    parts = [memoryview(x).cast("B") if x.size else b"" for x in arrays.values()]
    ends = itertools.accumulate(map(len, parts), initial=0)
    header: dict[str, Any] = {
        name: {"dtype": _NAMES[x.dtype.char], "shape": x.shape, "data_offsets": place}
        for (name, x), place in zip(
            arrays.items(), itertools.pairwise(ends), strict=True
        )
    }
    lines = json.dumps([records.first_bad, records.notes])
    checksum = _checksum(lines, parts)
    header["__metadata__"] = {"lines": lines, "checksum": checksum}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from parts


def _checksum(lines: str, parts: Iterable[bytes | memoryview | np.ndarray]) -> str:
    digest = xxhash.xxh3_128(lines.encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _read(entry: Path) -> EncodedRecords:
    """Reads an entry, whose arrays are mapped if it is large.

    Raises:
        OSError: It cannot be read, or others may have written it.
        ValueError: It has not the bytes that were written.
    """
    with open_private(entry) as file:
        os.utime(file.fileno())
        try:
            with safetensors.safe_open(entry, framework="numpy") as checked:
                metadata = checked.metadata() or {}
        except safetensors.SafetensorError as error:
            raise ValueError(str(error)) from error
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        if os.fstat(file.fileno()).st_size <= 8 * TOKENS_IN_MEMORY:
            content = np.frombuffer(file.read(), np.uint8)
        else:
            content = np.memmap(file, np.uint8, "r")[start:]
    if header.keys() - {"__metadata__"} != COLUMNS.keys():
        raise ValueError("it has other arrays")
    parts = {
        name: np.asarray(content[slice(*header[name]["data_offsets"])])
        for name in COLUMNS
    }
    lines = metadata.get("lines", "")
    if _checksum(lines, parts.values()) != metadata.get("checksum"):
        raise ValueError("its checksum is wrong")
    first_bad, notes = json.loads(lines)
    arrays: dict[str, Any] = {n: x.view(COLUMNS[n]) for n, x in parts.items()}
    return EncodedRecords(first_bad=first_bad, notes=tuple(map(tuple, notes)), **arrays)
