"""Reads the attention window of each layer from a Hugging Face config.json."""

from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.families.table import FAMILIES
from jaxlora.hf.config_values import flag, integer

Windows = tuple[int | None, ...]


def read_windows(family: str, values: Mapping[str, Any]) -> Windows:
    """Reads the attention window of each layer; None for a layer without one.

    Args:
        family: The `model_type`.
        values: A config.json with the family's defaults, without nulls.

    Raises:
        ModelError: A value is unsupported, or two of them contradict each other.
    """
    num_layers = integer(values, "num_hidden_layers")
    window = _window(family, values)
    windows = tuple(
        window if _has_window(family, values, layer) else None
        for layer in range(num_layers)
    )
    if "layer_types" in values:
        return _typed_windows(family, values["layer_types"], window, windows)
    if FAMILIES[family].windows == "pattern" and window is None:
        raise ModelError(
            f"config.json has sliding_window=null, and some layers of a {family} model "
            "have a window. Set it, or list layer_types that are all full_attention."
        )
    return windows


def _window(family: str, values: Mapping[str, Any]) -> int | None:
    """Reads the window of the layers that have one; None if no layer has one."""
    rule, window = FAMILIES[family].windows, values.get("sliding_window")
    if rule == "none":
        if window:
            raise ModelError(
                f"config.json sets sliding_window={shown(window)} for a {family} "
                "model, which has none."
            )
        return None
    if window is not None:
        window = integer(values, "sliding_window")
    if rule == "from_layer" and not flag(values, "use_sliding_window"):
        return None
    return window


def _has_window(family: str, values: Mapping[str, Any], layer: int) -> bool:
    """Tells whether a layer has a window if `layer_types` does not say so."""
    row = FAMILIES[family]
    match row.windows:
        case "none":
            return False
        case "all":
            return True
        case "from_layer":
            first = values.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int):
                raise ModelError(
                    f"config.json has max_window_layers={shown(first)}; wanted a whole "
                    "number."
                )
            return layer >= first
        case "pattern":
            period = row.window_pattern
            if "sliding_window_pattern" in row.keys & values.keys():
                period = integer(values, "sliding_window_pattern")
            return (layer + 1) % period != 0


def _typed_windows(
    family: str, kinds: Any, window: int | None, windows: Windows
) -> Windows:
    """Returns the attention windows by `layer_types`.

    Args:
        family: The `model_type`.
        kinds: Value of `layer_types`.
        window: Window of the layers that have one; None: no layer has one.
        windows: Windows of the layers without `layer_types`.
    """
    known = {"full_attention": None, "sliding_attention": window}
    fits = isinstance(kinds, list) and len(kinds) == len(windows)
    if not fits or any(kind not in list(known) for kind in kinds):
        raise ModelError(
            f"config.json has layer_types={shown(kinds)}; wanted one of "
            f"{sorted(known)} for each of the {len(windows)} layers."
        )
    if "sliding_attention" in kinds and window is None:
        raise ModelError(
            "config.json has layer_types with sliding_attention, and no sliding window "
            f"is in use for this {family} model. Set sliding_window (and, for a Qwen, "
            "use_sliding_window), or make the layers full_attention."
        )
    typed = tuple(known[kind] for kind in kinds)
    if FAMILIES[family].windows in ("none", "all") and typed != windows:
        raise ModelError(
            f"config.json has layer_types={shown(kinds)}, and all layers of a {family} "
            f"model have sliding_window={window}. Remove layer_types."
        )
    return typed
