"""Names in messages of other tools' data sets that are not known here."""

from collections.abc import Mapping
from typing import Any

from jaxlora.migrate.migration import Migration

# Fields of messages that are read as they are.
_FIELDS = (
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
)
# Names of speakers that these tools and jaxlora read alike, besides the roles.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def note_fields(migration: Migration, fields: Mapping[str, str]) -> None:
    """Says which fields of messages have to be renamed.

    Args:
        migration: The settings; it is told what to do.
        fields: Their names in the records, by what they are: role, content and others.
    """
    main = {name: fields[name] for name in ("role", "content")}
    others = {name: field for name, field in fields.items() if name not in main}
    if main not in _FIELDS or any(name != field for name, field in others.items()):
        migration.to_do.append(
            f"data: messages have the fields {dict(fields)}. Rename them in the "
            "records to role and content, or to from and value."
        )


def note_speakers(migration: Migration, role: str, speakers: list[Any]) -> None:
    """Says which speakers of a role have to be renamed."""
    for speaker in speakers:
        if _ROLES.get(str(speaker), speaker) != role:
            migration.to_do.append(
                f"data: the speaker {speaker!r} was read as the role {role!r}. Rename "
                "it in the records, unless `jaxlora data show` prints it so."
            )
