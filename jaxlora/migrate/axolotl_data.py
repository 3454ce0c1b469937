"""The data sets of Axolotl's YAML."""

from collections.abc import Mapping
from typing import Any

from jaxlora.data.templates.known import KNOWN
from jaxlora.migrate import messages, reasons, sources, templates
from jaxlora.migrate.migration import Migration

_TYPES: Mapping[str, dict[str, Any]] = {
    "alpaca": {"kind": "alpaca"},
    "completion": {"kind": "text"},
    "pretrain": {"kind": "text"},
    "chat_template": {"kind": "messages"},
    "sharegpt": {"kind": "messages", "messages": "conversations"},
    "alpaca_w_system.load_open_orca": {
        "kind": "prompt_completion",
        "prompt": "{% if system_prompt %}### System:\n{{ system_prompt }}\n{% endif %}"
        "### Human:\n{{ question }}\n### Assistant:\n",
        "completion": "response",
    },
    "alpaca_w_system.load_open_orca_chatml": {
        "kind": "prompt_completion",
        "prompt": "{% if system_prompt %}<|im_start|>system\n{{ system_prompt }}"
        "<|im_end|>\n{% endif %}<|im_start|>user\n{{ question }}<|im_end|>\n"
        "<|im_start|>assistant\n",
        "completion": "response",
    },
}
# The field that some types read if a record has it.
_SYSTEM = "{{ system | default('', true) }}"
# Values that are Axolotl's defaults, or mean nothing else here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": (
        ["assistant"],
        ["gpt"],
        ["assistant", "gpt"],
        ["gpt", "assistant"],
    ),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "field_tools": ("tools",),
}
_NO_SUCH_SETTING = "Change the records. `jaxlora data show` prints how they are read."
_ON_ROLES = (
    "loss_on: completion trains on what the assistant says, last on its last answer, "
    "and all on every token. A message with `weight: 0` is not trained on."
)
_THOUGHTS = "Name the thoughts in the records as the chat template does."
_REASONS = {
    "field_system": "Set system in data to the name of the field.",
    "field_thinking": _THOUGHTS,
    "template_thinking_key": _THOUGHTS,
    "conversation": reasons.OWN_TEMPLATE,
    "roles_to_train": _ON_ROLES,
    "message_field_training": _ON_ROLES,
    "message_field_training_detail": _ON_ROLES,
    "train_on_eos": "The token that ends a message that is trained on is trained on.",
    "train_on_eot": "The token that ends a message that is trained on is trained on.",
    "trust_remote_code": reasons.TRUST,
    "preprocess_shards": reasons.PREPARED,
    "shards": "Set limit to use the first records only.",
    "shards_idx": "Set limit to use the first records only.",
}


def take_data(
    migration: Migration, key: str, given: Any, on_all: bool, template: str | None
) -> dict[str, Any]:
    """Converts a list of data sets into `data`.

    Args:
        migration: The settings; it is told what is left out and to do.
        key: The setting that lists the data sets.
        given: Its value.
        on_all: Whether prompts are trained on, too.
        template: The setting `chat_template` for data sets of chats; None: the
            tokenizer's own.

    Raises:
        ConfigError: It is not a list of data sets.
    """
    listed = sources.list_datasets(given, key)
    return sources.join(
        [
            one
            for number, dataset in enumerate(listed)
            for one in _take_set(migration, key, number, dataset, on_all, template)
        ]
    )


def _take_set(
    migration: Migration,
    key: str,
    number: int,
    first: dict[str, Any],
    on_all: bool,
    template: str | None,
) -> list[dict[str, Any]]:
    """Converts a data set, which is one for each of its files."""
    where = f"{key}.{number}"
    kind = first.pop("type", None) or "completion"
    split = "test" if key == "test_datasets" else "train"
    found = sources.take_sources(migration, where, first, split)
    first.pop("ds_type", None)  # The suffix of the file says it.
    if isinstance(kind, dict):
        data = _own_type(migration, where, kind)
    else:
        data = _named_type(migration, str(kind))
    for field, ours in (("field_messages", "messages"), ("field", "text")):
        if value := first.pop(field, None):
            data[ours] = value
    if on_all:
        data["loss_on"] = "all"
    roles, is_chat = _roles(migration, first), data.get("kind") == "messages"
    if roles and is_chat:
        data["roles"] = roles
    own, jinja = first.pop("chat_template", None), first.pop("chat_template_jinja", "")
    template = take_template(migration, f"{where}.chat_template", own, jinja, template)
    if template is not None and is_chat:
        data["chat_template"] = template
    for setting, value in first.items():
        neutral = value in (None, "", [], {}, False)
        if not neutral and value not in _NEUTRAL.get(setting, ()):
            migration.left_out[f"{where}.{setting}"] = _REASONS.get(
                setting, _NO_SUCH_SETTING
            )
    return [{**one, **data} for one in found]


def take_template(
    migration: Migration, key: str, name: Any, text: Any, otherwise: str | None = None
) -> str | None:
    """Returns our setting `chat_template`; None: the tokenizer's own.

    Args:
        migration: The settings; it is told what is left out.
        key: The setting that names the template.
        name: Its value.
        text: The template, or a file of it, if the name is `jinja` or none.
        otherwise: The template if nothing is given.
    """
    if name in (None, ""):
        return str(text) if text else otherwise
    if name == "jinja" and text:
        return str(text)
    if str(name) in KNOWN:
        return str(name)
    if name != "tokenizer_default":
        migration.left_out[key] = f"{name!r} is not used. {reasons.OWN_TEMPLATE}"
    return None


def take_preferences(
    migration: Migration, key: str, given: Any, on_all: bool, template: str | None
) -> dict[str, Any]:
    """Converts a list of data sets of preferences; see `take_data`.

    Raises:
        ConfigError: It is not a list of data sets.
    """
    assert not on_all, "prompts are never trained on"
    return sources.join(
        [
            one
            for number, dataset in enumerate(sources.list_datasets(given, key))
            for one in _take_pairs(migration, key, number, dataset, template)
        ]
    )


def _take_pairs(
    migration: Migration,
    key: str,
    number: int,
    first: dict[str, Any],
    template: str | None,
) -> list[dict[str, Any]]:
    where = f"{key}.{number}"
    kind = first.pop("type", None)
    split = "test" if key == "test_datasets" else "train"
    found = sources.take_sources(migration, where, first, split)
    first.pop("ds_type", None)
    data: dict[str, Any] = {} if template is None else {"chat_template": template}
    own = dict(kind) if isinstance(kind, dict) else {}
    fields = {
        "prompt": own.pop("field_prompt", None) or first.pop("field_messages", None),
        "chosen": own.pop("field_chosen", None) or first.pop("field_chosen", None),
        "rejected": own.pop("field_rejected", None)
        or first.pop("field_rejected", None),
        "completion": own.pop("field_completion", None),
        "label": own.pop("field_label", None),
    }
    data |= {ours: str(field) for ours, field in fields.items() if field}
    if isinstance(kind, str) and kind.partition(".")[0] in ("chatml", "llama3"):
        data |= {"chat": True, "system": _SYSTEM}
    migration.to_do.append(
        f"data: type {kind!r} is read by its fields, with the tokenizer's own chat "
        "template. Check it with `jaxlora data show`, and name the fields in prompt, "
        "chosen and rejected, or prompt, completion and label, where they differ."
    )
    for name in own:
        migration.left_out[f"{where}.type.{name}"] = (
            "Write it into prompt, chosen or rejected, which may be templates."
        )
    for name, value in first.items():
        if value not in (None, "", [], {}, False):
            migration.left_out[f"{where}.{name}"] = _REASONS.get(name, _NO_SUCH_SETTING)
    return [source | data for source in found]


def _named_type(migration: Migration, kind: str) -> dict[str, Any]:
    base, _, style = kind.partition(":")
    name = base.removesuffix(".default")
    if name not in _TYPES:
        migration.to_do.append(
            f"data: type {kind!r} has no counterpart. Name the fields: prompt and "
            "completion (which may be templates), messages or text."
        )
        return {}
    if style:
        migration.to_do.append(
            f"data: type {kind!r} is read as {name!r}. If its prompts differ, set "
            "prompt and completion, which may be templates, instead of kind."
        )
    if _TYPES[name]["kind"] == "text":
        migration.to_do.append(
            "data: Axolotl divides a text that is longer than sequence_len into "
            "several samples; jaxlora does with it as too_long says. Divide long texts "
            "in the file."
        )
    return dict(_TYPES[name])


def _own_type(migration: Migration, where: str, kind: dict[str, Any]) -> dict[str, Any]:
    """Converts a type that the user described by fields and formats."""
    kind = {key: value for key, value in kind.items() if value not in (None, "")}
    names = {
        name: str(kind.pop(f"field_{name}", name)) for name in ("instruction", "input")
    }
    output = str(kind.pop("field_output", "output"))
    given = str(kind.pop("format", "{instruction} {input} "))
    plain = str(kind.pop("no_input_format", "{instruction} "))
    with_it = templates.template_of(given, names)
    without = templates.template_of(plain, names | {"input": ""})
    system = _system_of_own_type(migration, where, kind)
    for setting in kind:
        migration.left_out[f"{where}.type.{setting}"] = (
            "Write it into prompt, which is a template over the fields."
        )
    if with_it is None or without is None or system is None:
        migration.to_do.append(
            f"data.prompt: the formats {given!r} and {plain!r} cannot be converted. "
            "Give a template, such as '{{ instruction }}'."
        )
        return {"kind": "prompt_completion", "completion": output}
    prompt = with_it
    if "{input}" in given:
        prompt = templates.with_input(with_it, without, names["input"])
    data = {"kind": "prompt_completion", "completion": output}
    return data | {"prompt": system + prompt}


def _system_of_own_type(
    migration: Migration, where: str, kind: dict[str, Any]
) -> str | None:
    """Takes the text before all prompts; None if it cannot be part of a template."""
    given = str(kind.pop("system_format", "{system}"))
    text, field = kind.pop("system_prompt", ""), str(kind.pop("field_system", ""))
    if not field:
        text = given.replace("{system}", str(text)) if text else ""
        return None if any(mark in text for mark in ("{{", "{%", "{#")) else text
    if text:
        migration.left_out[f"{where}.type.system_prompt"] = (
            "The system prompt of each record is used."
        )
    whole = templates.template_of(given, {"system": field})
    return None if whole is None else templates.with_input(whole, "", field)


def _roles(migration: Migration, dataset: dict[str, Any]) -> dict[str, str]:
    """Returns the roles of speakers; says which names of fields are not known here."""
    given = dataset.pop("message_property_mappings", None)
    fields = dict(given) if isinstance(given, dict) else {}
    for ours in ("role", "content"):
        old = dataset.pop(f"message_field_{ours}", None)
        fields[ours] = fields.get(ours) or old or ours
    messages.note_fields(migration, fields)
    roles = dataset.pop("roles", None)
    speakers = {
        str(role): names if isinstance(names, list) else [names]
        for role, names in (roles if isinstance(roles, dict) else {}).items()
    }
    return messages.roles_of(migration, speakers)
