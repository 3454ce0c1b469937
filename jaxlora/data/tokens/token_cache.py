"""Keeps the tokens of data sets on disk, so that later runs need not make them again.

An entry is one file. Its name is a hash of everything that determines the tokens: the
bytes of the data, the settings, the tokenizer with its chat template, the versions of
libraries, and the source code of this package. It ends with a checksum. Entries are
written under a temporary name and renamed, so several processes may read and write them
at the same time. Only entries that nobody but this user may have written are used.
"""

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow
import pydantic
import tokenizers

from jaxlora.common import atomic
from jaxlora.common.cache_home import cache_home, check_private, make_private
from jaxlora.common.json_file import parse_json
from jaxlora.config import DataConfig
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.record_writer import TOKENS_IN_MEMORY
from jaxlora.data.tokens.samples import EncodedRecords
from jaxlora.errors import StorageError

_log = logging.getLogger(__name__)

_MAGIC = b"jaxlora tokens 3"
_ALIGNMENT = 64
_DIGEST_BYTES = 32
_SUFFIX = ".tokens"
_MAX_BYTES = 10 * 2**30
_ARRAYS: dict[str, type] = {
    "tokens": np.int32,
    "offsets": np.int64,
    "lengths": np.int64,
    "num_targets": np.int64,
    "values": np.float64,
    "run_offsets": np.int64,
    "run_ends": np.int64,
    "run_weights": np.float32,
    "top_counts": np.int64,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "is_whole": np.bool_,
    "is_bad": np.bool_,
}
_FLAGS = ("is_whole", "is_bad")
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
            records = _parse(_read(entry))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", error)
            return None
        # No step runs code of the file.
        except ValueError as error:
            what = "not trusted" if isinstance(error, _UntrustedError) else "damaged"
            text = "%s: these kept tokens are %s (%s), so they are made again."
            _log.warning(text, entry, what, error)
            return None
        _log.info("%s: its tokens are taken from %s", path, self._folder)
        return records

    def store(self, key: str, records: EncodedRecords) -> None:
        """Adds an entry, and removes old ones if there are too many."""
        try:
            make_private(self._folder)
            atomic.remove_leftovers(self._folder)
            with atomic.new_file(self._entry(key), mode=0o600) as file:
                digest = hashlib.sha256()
                for part in _format(records):
                    digest.update(part)
                    file.write(part)
                file.write(digest.digest())
            self._evict(keep=self._entry(key))
        except (OSError, StorageError) as error:
            self._warn("written", error)

    def _entry(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _evict(self, keep: Path) -> None:
        """Removes the entries that were used least recently, until the size fits."""
        entries = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                status = path.lstat()
            except FileNotFoundError:  # another process removed it
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._max_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size

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
    """Yields the bytes of an entry, except its checksum."""
    header = {
        "sizes": {name: len(getattr(records, name)) for name in _ARRAYS},
        "first_bad": records.first_bad,
        "notes": records.notes,
    }
    text = json.dumps(header).encode()
    start = _MAGIC + len(text).to_bytes(8, "little") + text
    yield start + bytes(-len(start) % _ALIGNMENT)
    for name, dtype in _ARRAYS.items():
        array = np.ascontiguousarray(getattr(records, name), dtype)
        yield memoryview(array).cast("B") if len(array) else b""
        yield bytes(-array.nbytes % _ALIGNMENT)


def _read(entry: Path) -> np.ndarray:
    """Returns the bytes of a file, in memory or, if it is large, mapped from it.

    Raises:
        OSError: It cannot be read.
        _UntrustedError: It is no file that only this user may have written.
    """
    # Opening a pipe or a device may wait, or have an effect.
    _check_entry(entry.lstat(), entry)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(entry, flags), "rb") as file:
        found = os.fstat(file.fileno())
        _check_entry(found, entry)
        os.utime(file.fileno())
        if found.st_size <= 8 * TOKENS_IN_MEMORY:
            return np.frombuffer(file.read(), np.uint8)
        return np.asarray(np.memmap(file, np.uint8, "r"))


class _UntrustedError(ValueError):
    """Somebody else may have made an entry."""


def _check_entry(found: os.stat_result, entry: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _UntrustedError("it is not a regular file")
    try:
        check_private(found, entry)
    except OSError as error:
        raise _UntrustedError(error.strerror) from error


class _Header(pydantic.BaseModel):
    """Metadata of an entry, beside its arrays.

    Attributes:
        sizes: Number of elements of each array, by name.
        first_bad: As in `EncodedRecords`.
        notes: As in `EncodedRecords`.
    """

    sizes: dict[str, Annotated[int, pydantic.Field(ge=0)]]
    first_bad: str
    notes: tuple[tuple[int, str], ...]


def _parse(content: np.ndarray) -> EncodedRecords:
    """Checks the bytes of an entry, and returns the records in it.

    Raises:
        ValueError: The bytes are not those that were written, or do not fit together.
    """
    body = content[:-_DIGEST_BYTES]
    digest = hashlib.sha256(body)
    if digest.digest() != content[-_DIGEST_BYTES:].tobytes():
        raise ValueError("its checksum is wrong")
    start = len(_MAGIC) + 8
    if body[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError("its first bytes are wrong")
    length = int.from_bytes(body[len(_MAGIC) : start].tobytes(), "little")
    header = _parse_header(body[start : start + length].tobytes())
    place = start + length + -(start + length) % _ALIGNMENT
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in _ARRAYS.items():
        num_bytes = header.sizes[name] * np.dtype(dtype).itemsize
        arrays[name] = body[place : place + num_bytes].view(dtype)
        place += num_bytes + -num_bytes % _ALIGNMENT
    if place != len(body):
        raise ValueError("its size is wrong")
    if any(arrays[name].view(np.uint8).max(initial=0) > 1 for name in _FLAGS):
        raise ValueError("its flags are wrong")
    _check_arrays(arrays)
    return EncodedRecords(first_bad=header.first_bad, notes=header.notes, **arrays)


def _parse_header(text: bytes) -> _Header:
    try:
        header = _Header.model_validate(parse_json(text))
    except pydantic.ValidationError as error:
        raise ValueError(f"its header has {error.error_count()} errors") from error
    if header.sizes.keys() != _ARRAYS.keys():
        raise ValueError("it has other arrays")
    return header


def _check_arrays(arrays: Mapping[str, np.ndarray]) -> None:
    """Checks that arrays have the sizes and bounds of the same records.

    Args:
        arrays: The arrays by name; see `EncodedRecords`.

    Raises:
        ValueError: They do not.
    """
    offsets, lengths, num_targets = (
        arrays[name] for name in ("offsets", "lengths", "num_targets")
    )
    num = len(lengths)
    by_record = (arrays[name] for name in ("num_targets", "values", *_FLAGS))
    others = len(offsets) - 1, *map(len, by_record)
    if num == 0 or set(others) != {num}:
        raise ValueError("its arrays have different sizes")
    stored = np.diff(offsets)
    if offsets[0] or offsets[-1] != len(arrays["tokens"]) or (stored < 0).any():
        raise ValueError("its offsets are wrong")
    if (lengths < stored).any() or (stored[arrays["is_bad"]] > 0).any():
        raise ValueError("its lengths are wrong")
    if (num_targets < 0).any() or (num_targets > stored).any():
        raise ValueError("its numbers of targets are wrong")
    _check_runs(arrays["run_offsets"], arrays["run_ends"], stored)
    if len(arrays["run_ends"]) != len(arrays["run_weights"]):
        raise ValueError("its arrays have different sizes")
    top_counts, top_ids = arrays["top_counts"], arrays["top_ids"]
    if len(top_counts) not in (0, num) or len(top_ids) != len(arrays["top_logprobs"]):
        raise ValueError("its arrays have different sizes")
    num_top = int((num_targets * top_counts).sum()) if len(top_counts) else 0
    if (top_counts < 0).any() or num_top != len(top_ids):
        raise ValueError("its log-probabilities are wrong")


def _check_runs(
    run_offsets: np.ndarray, run_ends: np.ndarray, stored: np.ndarray
) -> None:
    """Checks the runs of tokens of the same weight.

    Args:
        run_offsets: As in `EncodedRecords`.
        run_ends: As in `EncodedRecords`.
        stored: Number of stored tokens of each record.

    Raises:
        ValueError: They do not cover the tokens of their records.
    """
    if not len(run_offsets):
        run_offsets = np.zeros(len(stored) + 1, np.int64)
    if len(run_offsets) != len(stored) + 1:
        raise ValueError("its arrays have different sizes")
    num_runs = np.diff(run_offsets)
    has_runs = num_runs > 0
    if run_offsets[0] or run_offsets[-1] != len(run_ends) or (num_runs < 0).any():
        raise ValueError("its weights are wrong")
    sizes = np.diff(run_ends, prepend=0)
    sizes[run_offsets[:-1][has_runs]] = run_ends[run_offsets[:-1][has_runs]]
    last = run_ends[run_offsets[1:][has_runs] - 1]
    if (sizes <= 0).any() or (last != stored[has_runs]).any():
        raise ValueError("its weights are wrong")
