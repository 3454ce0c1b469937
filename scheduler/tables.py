"""Text tables of plans."""

from collections.abc import Sequence


def format_seconds(seconds: float) -> str:
    """Formats a duration with three digits and a unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def align(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligns columns; the first one to the left, the others to the right."""
    full = [head, *([*line, *[""] * (len(head) - len(line))] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    out = []
    for first, *rest in full:
        cells = [cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)]
        out.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(out)
