"""The name of the base model in an adapter's files."""

import dataclasses
import pathlib
import re

_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
# The hub's cache keeps OWNER/NAME at a commit in such a folder.
_CACHED = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})")
# Suffixes of data files, which may have the form of a hub id.
_FILES = {".jsonl", ".json", ".parquet", ".csv", ".arrow", ".feather"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BaseName:
    """The name of a base that an adapter's files tell.

    Attributes:
        name: Its hub id; of a local folder, the last part of its path, as the others
            may tell who the user is and nobody else has them. Model cards tell it.
        path: The hub id or the folder as it was given, by which it is loaded again.
        revision: Commit, branch or tag on the hub; None for a local folder.
        is_on_hub: Whether the name is a hub id.
    """

    name: str
    path: str
    revision: str | None
    is_on_hub: bool


def base_name(source: str, revision: str | None = None) -> BaseName:
    """Returns the name to tell of a base.

    Args:
        source: Folder or hub id.
        revision: Commit, branch or tag of a base on the hub.
    """
    if found := _CACHED.search(source):
        owner, name, commit = found.groups()
        return _on_hub(f"{owner}/{name}", commit)
    # A revision shows that a base is of the hub, whatever is in this folder.
    if is_hub_id(source) or (revision and _HUB_ID.fullmatch(source)):
        return _on_hub(source, revision)
    return _local(source)


def _on_hub(name: str, revision: str | None) -> BaseName:
    return BaseName(name=name, path=name, revision=revision, is_on_hub=True)


def _local(source: str) -> BaseName:
    name = last_part(source)
    return BaseName(name=name, path=source, revision=None, is_on_hub=False)


def run_base(source: str, revision: str | None) -> BaseName:
    """Returns the name of a run's base, of which a run on the hub knows the commit.

    Args:
        source: Folder or hub id, as the run was given it; a folder may be one that is
            relative to another working directory.
        revision: Commit on the hub; None: it was a folder.
    """
    found = base_name(source, revision)
    return _local(source) if found.revision is None else found


def is_hub_id(name: str) -> bool:
    """Whether a name may be OWNER/NAME on the hub: it is no file and no folder here."""
    is_id = _HUB_ID.fullmatch(name) and pathlib.PurePath(name).suffix not in _FILES
    return bool(is_id) and not pathlib.Path(name).exists()


def last_part(path: str) -> str:
    """Returns the last part of a path of any system; `unknown` if it has none."""
    name = pathlib.PureWindowsPath(path).name  # it divides at slashes as well
    return "unknown" if name in ("", ".", "..") else name
