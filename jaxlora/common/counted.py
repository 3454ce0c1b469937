"""Numbers of things in messages, in the singular and the plural."""


def counted(number: int, thing: str) -> str:
    """Returns `1 job`, `2 jobs` or `1,000 jobs`.

    Args:
        number: How many.
        thing: What they are, in the singular; its plural ends in s.
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
