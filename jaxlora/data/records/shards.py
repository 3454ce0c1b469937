"""Finds and reads the shards of a data set that is streamed."""

import dataclasses
import functools
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from jaxlora.common.counted import counted
from jaxlora.config import DataConfig
from jaxlora.data.records.files import (
    READERS,
    BadLineError,
    Record,
    os_errors,
    read_file,
)
from jaxlora.data.records.hub import Feed, Source, find_commit, load_hub, read_rows
from jaxlora.errors import DataError

# A fingerprint covers so many blocks of a file, evenly spaced; all of a small one.
_NUM_BLOCKS, _BLOCK_BYTES = 16, 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a data set, whose records are read in order.

    Attributes:
        name: Its name in the data set, by which it is known wherever the set lies.
        fingerprint: Changes with its contents: of a file, the hash of its size and of
            blocks of it, as whole sets are too large to be read before training; on
            the hub, the commit.
        read: Reads its records.
        is_file: Whether it is a file, so that an error in it is there each time.
        first: Number of first records that are left out.
    """

    name: str
    fingerprint: str
    read: Callable[[], Iterator[Record | BadLineError]]
    is_file: bool = True
    first: int = 0

    def records(self, start: int = 0) -> Iterator[Record | BadLineError]:
        """Reads its records from one of them on."""
        with os_errors(self.name):
            yield from itertools.islice(self.read(), self.first + start, None)


def open_shards(data: DataConfig) -> tuple[Shard, ...]:
    """Finds the shards of a data set, in the order of their names.

    Args:
        data: Names a file, a folder of files, a glob or a data set on the hub; `skip`
            leaves out first records.

    Raises:
        DataError: There is none, or they cannot be read.
    """
    files = _find_files(data)
    shards = _of_files(data, files) if files else _of_hub(data)
    left, out = data.skip, []
    for shard in shards:
        num = sum(1 for _ in itertools.islice(shard.records(), left)) if left else 0
        left -= num
        if not left:
            out.append(dataclasses.replace(shard, first=num))
    if not out:
        raise DataError(
            f"{data.path}: holds {counted(data.skip - left, 'record')}, and skip="
            f"{data.skip} leaves out all of them. Lower data.skip."
        )
    return tuple(out)


def read_shards(shards: Sequence[Shard], limit: int | None) -> Source:
    """Returns functions that read the first records of shards, and feed a hash."""

    def read() -> Iterator[Record | BadLineError]:
        for shard in shards:
            yield from shard.records()

    def feed_all(feed: Feed) -> None:
        for record in itertools.islice(read(), limit):
            feed(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")

    return read, feed_all


def check_shards_found(data: DataConfig) -> None:
    """Checks that there are shards; reads none.

    Raises:
        DataError: There are not. Ids on the hub are not looked up.
    """
    if _find_files(data):
        for key in ("split", "subset", "revision"):
            if (value := getattr(data, key)) is not None:
                raise DataError(
                    f"{data.path}: {key}={value!r} is for datasets on the hub, and "
                    f"these are files. Remove data.{key}."
                )


def _find_files(data: DataConfig) -> list[Path]:
    """Returns the files that a path names, sorted; none if it is an id on the hub."""
    try:
        path = Path(data.path).expanduser()
        with os_errors(data.path):
            if path.is_dir():
                found = [p for p in path.rglob("[!.]*") if p.is_file()]
            elif path.is_file():
                found = [path]
            else:
                names = glob.glob(str(path), recursive=True)
                found = [p for p in map(Path, names) if p.is_file()]
    except (RuntimeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"data.path {data.path!r:.200} cannot be a path: {error}. Correct it."
        ) from error
    is_no_id = data.path.startswith((".", "/", "~")) or data.path.count("/") > 1
    is_no_id |= path.is_dir() or path.suffix in READERS or glob.has_magic(data.path)
    if not found and is_no_id:
        raise DataError(
            f"{data.path}: no files of records (looked in {Path.cwd()}). Name a folder "
            "that holds some, a glob such as 'shards/*.jsonl', or a dataset id such as "
            "'owner/name'."
        )
    _check_suffixes(data, found)
    return sorted(found)


def _check_suffixes(data: DataConfig, files: Sequence[Path]) -> None:
    suffixes = sorted({path.suffix for path in files})
    if len(suffixes) > 1:
        raise DataError(
            f"{data.path}: holds files of several kinds ({', '.join(suffixes)}). Name "
            f"those that hold the records by a glob, such as '*{suffixes[-1]}'."
        )
    if suffixes and suffixes[0] not in READERS:
        raise DataError(
            f"{data.path}: unknown suffix {suffixes[0]!r}. Convert the files to one "
            f"of: {', '.join(READERS)}."
        )


def _of_files(data: DataConfig, files: Sequence[Path]) -> list[Shard]:
    keeps_bad = data.bad_records == "drop"
    root = os.path.commonpath([path.absolute().parent for path in files])
    with os_errors(data.path):
        return [
            Shard(
                name=os.path.relpath(path.absolute(), root),
                fingerprint=_fingerprint(path),
                read=functools.partial(read_file, path, keeps_bad=keeps_bad),
            )
            for path in files
        ]


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    last = max(0, size - _BLOCK_BYTES)
    with path.open("rb") as file:
        if last < (_NUM_BLOCKS - 1) * _BLOCK_BYTES:
            digest.update(file.read())
        else:
            for number in range(_NUM_BLOCKS):
                file.seek(last * number // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _of_hub(data: DataConfig) -> list[Shard]:
    """Returns the shards of a data set on the hub, all of the same commit."""
    commit = find_commit(data)
    dataset = load_hub(data, streaming=True, revision=commit)
    num = dataset.num_shards

    def reader(index: int) -> Callable[[], Iterator[Record]]:
        part = dataset.shard(num_shards=num, index=index)
        return lambda: read_rows(part, data.path)

    return [
        Shard(
            name=f"{data.split or 'shard'}-{index:05d}-of-{num:05d}",
            fingerprint=commit,
            read=reader(index),
            is_file=False,
        )
        for index in range(num)
    ]
