"""Names in messages of other tools' data sets that are not known here."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.migrate.migration import Migration

# Fields of messages that are read as they are.
_FIELDS = (
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
)
# Names of speakers that these tools and jaxlora read alike, besides the roles.
_KNOWN = ("system", "user", "assistant", "tool", "function_call")
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
