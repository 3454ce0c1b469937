"""Data sets of other tools: where their records are, who speaks, and prompt formats."""

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate.migration import Migration

# Suffixes of files with records, and of those that have to be converted first.
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".feather")
_OTHER_FILES = (".txt", ".tsv", ".gz", ".zst", ".zip", ".bz2", ".xz")
# The names that the package `datasets` gives to its readers of files.
_READERS = ("json", "csv", "parquet", "arrow", "text")
_FIRST_RECORDS = re.compile(r"\w*\[:([0-9]{1,15})\]")
# Fields of messages that are read as they are.
_FIELDS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
# Names of speakers that these tools and jaxlora read alike, besides the roles.
_KNOWN = ("system", "user", "assistant", "tool", "function_call")
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_MARKS = ("{{", "{%", "{#")  # of Jinja


def list_datasets(given: Any, key: str) -> list[dict[str, Any]]:
    """Returns the descriptions of data sets that a setting lists.

    Raises:
        ConfigError: It is not a list of mappings with paths.
    """
    if isinstance(given, list) and all(
        isinstance(one, dict) and (one.get("path") or one.get("data_files"))
        for one in given
    ):
        return [dict(one) for one in given]
    raise ConfigError(
        f"{key} is {given!r:.80}, which is not a list of data sets. Write it as a "
        "list of mappings with a path, such as [{path: records.jsonl}]."
    )


def join(sets: Sequence[dict[str, Any]], **mix: Any) -> dict[str, Any]:
    """Returns `data` of some data sets, and how several of them are mixed."""
    return sets[0] if len(sets) == 1 else {**mix, "datasets": list(sets)}


def all_sets(migration: Migration) -> Iterator[dict[str, Any]]:
    """Yields the settings of each data set of the job."""
    for key in ("data", "eval_data"):
        if data := migration.job.get(key):
            yield from data.get("datasets") or [data]


def set_template_kwargs(migration: Migration, key: str, kwargs: Any) -> None:
    """Gives data sets that may be chats values of variables of the chat template."""
    if not kwargs:
        return
    kinds = ("auto", "messages", "preference", "unpaired")
    chats = [
        one
        for one in all_sets(migration)
        if one.get("chat") or one.get("kind", "auto") in kinds
    ]
    for one in chats:
        one["chat_template_kwargs"] = kwargs
    if not chats:
        migration.left_out[key] = "No data set has messages."


def take_sources(one: Migration, default_split: str) -> list[dict[str, Any]]:
    """Takes the location of a data set from its description.

    Args:
        one: The description, with the arguments of `datasets.load_dataset`: path, name,
            data_files, split and revision.
        default_split: The split of a data set on the hub, if none is given.

    Returns:
        path, subset, split, revision and limit of `data`, where they are needed, for
        each of its files.
    """
    split, name, revision = map(one.take, ("split", "name", "revision"))
    wanted = str(split or default_split)
    paths = _take_paths(one, wanted)
    if is_on_hub(paths[0]):
        one.to_do.append(
            f"data.path: {paths[0]} is a data set on the hub. It needs `pip install "
            "'jaxlora[datasets]'`; or download it, and give the file."
        )
        source = {"path": paths[0], "subset": name, "split": wanted}
        source["revision"] = revision
        return [{setting: value for setting, value in source.items() if value}]
    for setting, value in (("name", name), ("revision", revision)):
        if value:
            one.leave_out(setting, f"{value!r}: it is for data sets on the hub.")
    limit: dict[str, Any] = {}
    if first := _FIRST_RECORDS.fullmatch(str(split or "")):
        limit["limit"] = int(first[1])
        if len(paths) > 1:
            one.to_do.append(
                f"data.limit: {one.where} had the first {first[1]} records of "
                f"{len(paths)} files together; here it is of each."
            )
    elif split and split != "train":
        one.leave_out(
            "split",
            f"{str(split)!r}: all records of a local file are read. Set limit to read "
            "the first ones only, or give a file with those that are meant.",
        )
    return [{"path": path, **limit} for path in paths]


def is_on_hub(path: str) -> bool:
    """Whether a path is the id of a data set on the hub, by its form."""
    is_place = path.startswith((".", "/", "~")) or ":" in path or "\\" in path
    is_file = path.endswith((*_FILES, *_OTHER_FILES))
    return not is_place and not is_file and path.count("/") <= 1


def _take_paths(one: Migration, split: str) -> list[str]:
    path, files = str(one.take("path", "")), one.take("data_files")
    if isinstance(files, dict):  # a file, or a list of files, by split
        others = [name for name in files if name != split]
        if split in files:
            for name in others:
                one.leave_out(f"data_files.{name}", f"The split {split} is read.")
            others = [split]
        files = [f for name in others for f in _as_list(files[name])]
    paths = list(map(str, _as_list(files))) or [path]
    say = one.to_do.append
    if files and path and path not in _READERS:
        verb = "download" if is_on_hub(path) else "find"
        for file in paths:
            say(f"data.path: {verb} {file} of {path}, and give its path here.")
    for at in paths:  # Some cannot be read where or as they are.
        if at.endswith(_OTHER_FILES):
            say(f"data.path: convert {at} to one of {', '.join(_FILES)}, and give it.")
        elif "://" in at:
            say(f"data.path: download {at}, and give the file.")
        elif "*" in at:
            say(f"data.path: list the files {at} in datasets.")
    return paths


def _as_list(value: Any) -> list[Any]:
    if value in (None, ""):
        return []
    return list(value) if isinstance(value, list) else [value]


def note_fields(migration: Migration, fields: Mapping[str, str]) -> None:
    """Says which fields of messages have to be renamed.

    Args:
        migration: The settings; it is told what to do.
        fields: Their names in the records, by what they are: role, content and others.
    """
    main = {name: fields[name] for name in ("role", "content")}
    if main not in _FIELDS or any(fields[n] != n for n in fields.keys() - main.keys()):
        migration.to_do.append(
            f"data: messages have the fields {dict(fields)}. Rename them in the "
            "records to role and content, or to from and value."
        )


def roles_of(
    migration: Migration, speakers: Mapping[str, Sequence[Any]]
) -> dict[str, str]:
    """Returns the roles of speakers whose names do not say them here.

    Args:
        migration: The settings; it is told what to do.
        speakers: The speakers of each role.
    """
    roles = {}
    for role, names in speakers.items():
        for name in names:
            if _ROLES.get(str(name), name) == role:
                continue
            if role in _KNOWN:
                roles[str(name)] = role
                continue
            migration.to_do.append(
                f"data: the speaker {name!r} was read as the role {role!r}. Rename it "
                "in the records, unless `jaxlora data show` prints it so."
            )
    return roles


def is_template(text: str) -> bool:
    """Whether a text has marks of Jinja."""
    return any(mark in text for mark in _MARKS)


def template_of(text: str, fields: Mapping[str, str]) -> str | None:
    """Returns a Jinja template for a text with names in braces, as `str.format` has.

    Args:
        text: The text, such as "Question: {input}".
        fields: The field of the records for each name.

    Returns:
        The template; None if the text has other names, or a field cannot be named in a
        template.
    """
    out = []
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        return None
    for literal, name, _, _ in parts:
        if is_template(literal):
            return None
        out.append(literal)
        if name is not None:
            if not fields.get(name, "").isidentifier():
                return None
            out.append(f"{{{{ {fields[name]} }}}}")
    return "".join(out)


def with_input(with_it: str, without: str, field: str) -> str:
    """Returns a template that has two forms, for records with a field and without."""
    condition = f"{{% if {field} is defined and {field} %}}"
    return f"{condition}{with_it}{{% else %}}{without}{{% endif %}}"
