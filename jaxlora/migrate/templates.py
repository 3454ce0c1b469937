"""Templates over fields of records from the prompt formats of other tools."""

import string
from collections.abc import Mapping


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
        if any(mark in literal for mark in ("{{", "{%", "{#")):
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
