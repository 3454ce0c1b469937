"""The table of the settings of slots, which programs take as arrays.

There is one array per setting, of all slots in all adapted linears, because hundreds of
small arrays would cost host time in each step. Shapes, uploads, sections of layers,
generation and the Flax modules loop over this table, so a new setting is one more entry
and its use in a module.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxlora.models.slot_modules import SLOT_MODULES, SlotModule

# The arrays by key, in the order of the table. That of a setting of linears is M G ...,
# where M are the linears in the order of `DecoderSpec.adapted`; another is 1 G ...
SlotSettings = collections.OrderedDict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSetting:
    """One setting of slots.

    Attributes:
        name: Name of the `SlotVariable` that a module has for it.
        dtype: Dtype of its array.
        value: Returns its value for an `Adapter`, and for that one's `LoraWeights` in a
            linear if each linear has a value of its own. Of an array, what the adapter
            lacks is `fill`. None: the adapter has no value.
        sizes: Returns the shape of a slot's value in a `DecoderSpec`; None: there is
            none, as no slot of the run needs it.
        fill: The value with which a slot gives the base.
        module: Path of the module outside the linears that has it; None: linears do.
        is_shared: Whether all linears have the same large array. It has no effect where
            the rank is 0, so settings of the base share it, too.
    """

    name: str
    dtype: DTypeLike
    value: Callable[..., Any]
    sizes: Callable[[Any], tuple[int, ...] | None] = lambda spec: ()
    fill: int = 0
    module: str | None = None
    is_shared: bool = False

    @property
    def key(self) -> str:
        """Its name in `SlotSettings`."""
        return self.name if self.module is None else f"{self.module}.{self.name}"

    @property
    def is_of_linears(self) -> bool:
        """Whether each linear has a value of its own."""
        return self.module is None and not self.is_shared


def _of_variant(
    name: str, dtype: DTypeLike, value: Callable[..., Any], *, is_shared: bool = False
) -> SlotSetting:
    """A setting that a variant of LoRA reads, which says its shape.

    One that is shared has the most input and output features of a linear.
    """

    def sizes(spec: Any) -> tuple[int, ...] | None:
        linears = [spec.linear(path) for path in spec.adapted]
        k = max((linear.in_features for linear in linears), default=0)
        n = max((linear.out_features for linear in linears), default=0)
        if is_shared and not linears:
            return None
        read = (one.settings(spec.slots, k, n) for one in spec.slots.variants)
        return next((found[name].shape for found in read if name in found), None)

    return SlotSetting(
        name=name, dtype=dtype, value=value, sizes=sizes, is_shared=is_shared
    )


def _of_module(module: SlotModule) -> SlotSetting:
    """The tokens whose rows a slot trains, or whether it trains a whole copy."""

    def sizes(spec: Any) -> tuple[int, ...] | None:
        is_here = spec.has_embedding if module.is_first else spec.has_head
        num_rows = spec.slots.num_rows(module.name)
        if not is_here or not num_rows:
            return None
        return (num_rows,) if module.has_tokens else ()

    def value(adapter: Any) -> Any:
        own = adapter.outside.get(module.name)
        if own is not None and module.has_tokens:
            return np.asarray(own.tokens, np.int32)
        return None if own is None else True

    return SlotSetting(
        name="ids" if module.has_tokens else "is_trained",
        dtype=np.int32 if module.has_tokens else np.bool_,
        value=value,
        sizes=sizes,
        fill=-1 if module.has_tokens else 0,
        module=module.name,
    )


# Programs take the arrays in this order, so new entries go to the end.
SETTINGS: tuple[SlotSetting, ...] = (
    SlotSetting(
        name="scaling",
        dtype=np.float32,
        value=lambda adapter, weights: adapter.scaling(weights),
    ),
    SlotSetting(
        name="dropout",
        dtype=np.float32,
        value=lambda adapter, weights: adapter.dropout,
    ),
    # It is 0 in linears that the slot does not adapt.
    SlotSetting(
        name="rank", dtype=np.int32, value=lambda adapter, weights: weights.rank
    ),
    # The ranks after it are fixed.
    _of_variant(
        "trained_rank",
        np.int32,
        lambda adapter, weights: adapter.trained_rank(weights),
    ),
    # Each linear takes the first features of the frozen matrices.
    _of_variant("vera_a", np.float32, lambda x: x.vera and x.vera.a, is_shared=True),
    _of_variant("vera_b", np.float32, lambda x: x.vera and x.vera.b, is_shared=True),
    _of_variant("has_vera", np.bool_, lambda x: x.vera is not None, is_shared=True),
    *(_of_module(module) for module in SLOT_MODULES.values() if module.frozen),
)


def settings_in(keys: Iterable[str]) -> list[SlotSetting]:
    """Returns the entries of some settings, in the order of the table."""
    keys = set(keys)
    return [setting for setting in SETTINGS if setting.key in keys]


def settings_of_base(
    like: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> SlotSettings:
    """Returns settings with which every slot gives the base, as arrays of the host.

    Args:
        like: Settings of these shapes.
        given: Settings from which those are taken that are shared; None: all are made.
    """
    found, given = SlotSettings(), given or {}
    for s in settings_in(like):
        is_taken = s.is_shared and s.key in given
        made = given[s.key] if is_taken else np.full(like[s.key].shape, s.fill, s.dtype)
        found[s.key] = made
    return found


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of some settings that all linears share, which are large."""
    return {s.key: settings[s.key] for s in settings_in(settings) if s.is_shared}


def settings_by_path(settings: SlotSettings, adapted: Sequence[str]) -> dict[str, Any]:
    """Returns the variable of each setting of each module, by its path.

    Args:
        settings: The settings.
        adapted: Paths of the adapted linears.
    """
    entries = settings_in(settings)
    of_linears = [setting for setting in entries if setting.is_of_linears]
    found = {
        f"{path}.{setting.name}": settings[setting.key][i]
        for i, path in enumerate(adapted)
        for setting in of_linears
    }
    for setting in entries:
        if not setting.is_of_linears:
            modules = adapted if setting.module is None else [setting.module]
            # Slices for each linear would be kept for the backward pass.
            value = settings[setting.key][0]
            found |= {f"{path}.{setting.name}": value for path in modules}
    return found
