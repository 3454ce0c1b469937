"""Names of jobs, and the name that stands for the base model."""

import re

BASE = "base"  # names the base model, where the name of an adapter is wanted
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_plain_name(name: object) -> bool:
    """Whether a name can name a folder."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_job_name(name: str, *, kind: str = "job") -> str:
    """Returns a name if it can name a folder and an adapter.

    Args:
        name: The name.
        kind: What it names, for the error.

    Raises:
        ValueError: It cannot.
    """
    if not is_plain_name(name):
        raise ValueError(
            f"{kind} name {name!r} must be a plain folder name: letters, digits, '.', "
            "'_' and '-', at most 100, not starting with '.', '_' or '-'."
        )
    if name == BASE:
        raise ValueError(
            f"{kind} name {name!r} is the name of the base model when text is "
            f"generated. Give the {kind} another name."
        )
    return name
