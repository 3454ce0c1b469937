"""The data sets of LLaMA-Factory, which its dataset_info.json describes."""

import pathlib
from typing import Any, Literal

from jaxlora.common.json_file import read_json_file
from jaxlora.errors import ConfigError
from jaxlora.migrate import messages, reasons, sources, templates
from jaxlora.migrate.migration import Migration

_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_MEDIA = ("images", "videos", "audios")
_ROLE_OF_TAG = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}


def take_data(
    migration: Migration,
    key: str,
    names: Any,
    folder: str,
    *,
    is_text: bool,
    mix: dict[str, Any],
    preferences: Literal["pairs", "labels"] | None = None,
) -> dict[str, Any]:
    """Converts the names of data sets into `data`.

    Args:
        migration: The settings; it is told what is left out and to do.
        key: The setting that names the data sets.
        names: Its value: a list, or names with commas between them.
        folder: The folder of dataset_info.json, which is used if it is there.
        is_text: Whether the records are trained on as plain text.
        mix: How several data sets are mixed.
        preferences: Which preferences the job learns from.

    Raises:
        ConfigError: dataset_info.json is damaged, or records are preferences and the
            job does not learn from these.
    """
    names = names if isinstance(names, list) else str(names).split(",")
    names = [name for one in names if (name := str(one).strip())]
    sets = [
        one
        for name in names or ["records"]
        for one in _take_sets(migration, key, name, folder, is_text, preferences)
    ]
    return sources.join(sets, **mix)


def _take_sets(
    migration: Migration,
    key: str,
    first: str,
    folder: str,
    is_text: bool,
    preferences: Literal["pairs", "labels"] | None,
) -> list[dict[str, Any]]:
    """Converts the name of a data set, which is one for each of its files."""
    entry = {"hf_hub_url": first} if folder == "ONLINE" else _look_up(folder, first)
    if entry is not None:
        where = f"{key}: {first}"
        found = _sources(migration, where, entry, folder)
        if preferences is None:
            fields = _fields(migration, where, entry, is_text=is_text)
        else:
            fields = _preferences(migration, where, entry, preferences)
        return [source | fields for source in found]
    setting = "data" if key == "dataset" else "eval_data"
    migration.to_do.append(
        f"{setting}.path: look up {first!r} in {folder}/dataset_info.json, and give "
        "its file or hub id. LLaMA-Factory renders all records by a chat template: for "
        "records with instruction, input and output, set kind: alpaca and chat: true."
    )
    guess: dict[str, Any] = {"path": f"{folder}/{first}.json"}
    if preferences is not None:
        return [guess]
    return [guess | {"kind": "text"} if is_text else guess]


def _look_up(folder: str, name: str) -> dict[str, Any] | None:
    """Returns the description of a data set; None if there is none."""
    path = pathlib.Path(folder) / "dataset_info.json"
    try:
        found = read_json_file(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # without the path
        raise ConfigError(f"{path} cannot be read: {why}. Correct it.") from error
    entry = found.get(name) if isinstance(found, dict) else None
    return entry if isinstance(entry, dict) else None


def _sources(
    migration: Migration, where: str, entry: dict[str, Any], folder: str
) -> list[dict[str, Any]]:
    dataset = {"split": entry.get("split")}
    if hub_id := entry.get("hf_hub_url"):
        dataset |= {"path": hub_id, "name": entry.get("subset")}
    elif file := entry.get("file_name"):
        dataset["path"] = str(pathlib.PurePath(folder, str(file)))
    else:
        migration.to_do.append(
            f"data.path: {where} is in none of a file and the Hugging Face hub. "
            "Download it, and give the file."
        )
        dataset["path"] = "records.jsonl"
    found = sources.take_sources(migration, where, dataset, "train")
    if limit := entry.get("num_samples"):
        return [source | {"limit": limit} for source in found]
    return found


def _fields(
    migration: Migration, where: str, entry: dict[str, Any], *, is_text: bool
) -> dict[str, Any]:
    columns = entry.get("columns")
    is_default = not isinstance(columns, dict)
    given: dict[str, Any] = {} if is_default else dict(columns)
    if entry.get("ranking") or "kto_tag" in given:
        raise ConfigError(
            f"{where} has records with preferences, which supervised training does "
            "not learn from. Set stage: dpo, kto or rm, or give other records."
        )
    if entry.get("formatting", "alpaca") != "alpaca":
        field = given.pop("messages", None) or "conversations"
        data = _conversations(migration, entry, str(field))
    else:
        used = _ALPACA if is_default else {k: given.pop(k, None) for k in _ALPACA}
        data = _instructions(migration, used, is_text=is_text)
    _take_columns(migration, where, given, data)
    return data


def _take_columns(
    migration: Migration, where: str, given: dict[str, Any], data: dict[str, Any]
) -> None:
    """Takes the columns that are neither prompts nor answers."""
    field = given.pop("system", None)
    if field and data.get("kind") == "text":
        migration.left_out[f"{where}.system"] = f"{field}: texts have no such message."
    elif field:
        data["system"] = str(field)
    for column, field in given.items():
        if (field and field != column) or column in ("history", *_MEDIA):
            migration.left_out[f"{where}.{column}"] = (
                reasons.TEXT_ONLY
                if column in _MEDIA
                else f"{field}: put it into the messages or the prompts of the records."
            )


def _preferences(
    migration: Migration, where: str, entry: dict[str, Any], preferences: str
) -> dict[str, Any]:
    """Converts the description of pairs, or of answers with labels."""
    columns = entry.get("columns")
    given = dict(columns) if isinstance(columns, dict) else {}
    is_pairs = preferences == "pairs"
    has_pairs = bool(entry.get("ranking"))
    if has_pairs != is_pairs:
        raise ConfigError(
            f"{where} has ranking: {str(has_pairs).lower()}, and the stage of the file "
            f"learns from {preferences}. Give other records."
        )
    data: dict[str, Any] = {}
    if is_pairs:
        for name in ("chosen", "rejected"):
            if field := given.pop(name, None):
                data[name] = str(field)
    elif field := given.pop("kto_tag", None):
        data["label"] = str(field)
    if entry.get("formatting", "alpaca") != "alpaca":
        field = str(given.pop("messages", None) or "conversations")
        found = _conversations(migration, entry, field)
        data["prompt" if is_pairs else "messages"] = found.pop("messages")
        data |= {key: found[key] for key in ("roles",) if key in found}
        _take_columns(migration, where, given, data)
        return data
    used = {k: given.pop(k, None) for k in _ALPACA} if given else dict(_ALPACA)
    used["response"] = used["response"] or "output"
    found = _instructions(migration, used, is_text=False)
    if found["kind"] == "alpaca":
        prompt = "{{ instruction }}\n{{ input }}"
        found = {"prompt": prompt, "completion": "output", "chat": True}
    data |= {"prompt": found["prompt"], "chat": True}
    if not is_pairs:
        data["completion"] = found["completion"]
    _take_columns(migration, where, given, data)
    return data


def _instructions(
    migration: Migration, used: dict[str, Any], *, is_text: bool
) -> dict[str, Any]:
    prompt, query = str(used["prompt"] or "instruction"), used["query"]
    if not used["response"] and not is_text:
        migration.to_do.append(
            "data.kind: there is no field of answers, so the records are read as text."
        )
    if is_text or not used["response"]:
        return {"kind": "text", "text": prompt}
    if used == _ALPACA:
        return {"kind": "alpaca", "chat": True}
    if query:
        names = {"prompt": prompt, "query": str(query)}
        both = templates.template_of("{prompt}\n{query}", names)
        alone = templates.template_of("{prompt}", names)
        if both is None or alone is None:
            migration.to_do.append(
                f"data.prompt: give a template of the fields {prompt!r} and {query!r}."
            )
        else:
            prompt = templates.with_input(both, alone, str(query))
    return {
        "kind": "prompt_completion",
        "prompt": prompt,
        "completion": used["response"],
        "chat": True,
    }


def _conversations(
    migration: Migration, entry: dict[str, Any], field: str
) -> dict[str, Any]:
    tags = entry.get("tags")
    tags = tags if isinstance(tags, dict) else {}
    fields = {"role": tags.get("role_tag"), "content": tags.get("content_tag")}
    if any(fields.values()):
        messages.note_fields(migration, {k: str(v) for k, v in fields.items()})
    speakers = {role: [tags[t]] for t, role in _ROLE_OF_TAG.items() if tags.get(t)}
    data: dict[str, Any] = {"kind": "messages", "messages": field}
    if roles := messages.roles_of(migration, speakers):
        data["roles"] = roles
    return data
