"""Names of a sweep's configurations, which a person can read: `lr3e-4-r16`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.config.space import Axis

_SHORT = {
    "learning_rate": "lr",
    "rank": "r",
    "lora_alpha": "a",
    "batch_size": "bs",
    "dropout": "do",
    "epochs": "ep",
    "steps": "st",
    "seed": "s",
    "warmup_ratio": "wr",
    "warmup_steps": "ws",
    "weight_decay": "wd",
    "max_grad_norm": "gn",
    "lora_plus_ratio": "plus",
    "max_length": "len",
}
# The values of these settings say what they are.
_BARE = {"lr_schedule", "optimizer", "objective", "target_modules", "data", "eval_data"}
_LONGEST = 80  # of 100 characters that a name may have


class Namer:
    """Gives different names; a number is added where two would be the same."""

    def __init__(self):
        self._taken: set[str] = set()
        self._last: dict[str, int] = {}  # number that was added last, by name

    def reserve(self, name: str) -> None:
        """Notes a name that is taken."""
        self._taken.add(name.lower())

    def name(
        self, prefix: str, settings: Mapping[str, Any], axes: Sequence[Axis]
    ) -> str:
        """Returns the name of a configuration.

        Args:
            prefix: Name of the job that it is made from; may be empty.
            settings: What the sweep has set, by our name.
            axes: The settings that are varied. Those of one value are not named.
        """
        constant = {a.name for a in axes if a.space.values and len(a.space.values) == 1}
        parts = [_part(k, v) for k, v in settings.items() if k not in constant]
        whole = "-".join([part for part in (prefix, *parts) if part]) or "c1"
        whole = whole[:_LONGEST].rstrip(".-_")
        found, number = whole, self._last.get(whole.lower(), 1)
        while found.lower() in self._taken:
            number += 1
            found = f"{whole}-{number}"
        self._last[whole.lower()] = number
        self._taken.add(found.lower())
        return found


def _part(name: str, value: Any) -> str:
    last = name.rpartition(".")[2]
    text = re.sub(r"[^A-Za-z0-9._-]+", "_", value_text(value)).strip("._-")
    if name in _BARE and text[:1].isalpha():
        return text
    return (_SHORT.get(name, last.replace("_", "")) + text)[:_LONGEST]


def value_text(value: Any) -> str:
    """Returns a value of a setting in a few characters."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, list | tuple):
        return "_".join(map(value_text, value))
    if isinstance(value, Mapping):
        path = value.get("path")
        if sets := value.get("datasets"):
            paths = (x if isinstance(x, Mapping) else {"path": x} for x in sets)
            return "_".join(map(value_text, paths))
        if isinstance(path, str):
            return re.sub(r"\.\w+$", "", path.rstrip("/").rpartition("/")[2])
        return "_".join(f"{k}{value_text(v)}" for k, v in value.items())
    return str(value)


def number_text(value: int | float) -> str:
    """Returns a number as short as three significant digits allow, such as `3e-4`."""
    if isinstance(value, int) and abs(value) < 1e6:
        return str(value)
    try:
        text = f"{value:.3g}"
    except OverflowError:  # a whole number that no float is as large as
        return "large"
    if value and (abs(value) < 1e-2 or "e" in text):
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return text
