"""The settings of slots in the linears of a decoder, as arrays."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlora.models.token_rows import ROW_MODULES
from jaxlora.models.whole_tables import WHOLE_MODULES
from jaxlora.modules.vera import VeraTables


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSettings:
    """Settings of the slots in every adapted linear, in the order of `adapted`.

    There is one array per setting, because hundreds of small arrays would cost host
    time in each step.

    Attributes:
        scaling: `lora_alpha / rank`.
        dropout: Dropout rate.
        rank: Rank of the slot's adapter there; 0 where it does not adapt.
        trained_rank: Ranks that are trained; the others are fixed. None: all are, as
            no slot keeps its first weights.
        vera: Matrices of VeRA, which all linears share; None: no slot has VeRA.
        token_ids: Tokens whose rows a slot trains, by name of the module in which
            these are frozen (`embed_tokens`, `lm_head`); -1: none. A module is absent
            if no slot trains rows of it on this stage.
        trains_whole: Whether a slot trains a whole copy of a module, by its name, which
            is absent if no slot does on this stage.
    """

    scaling: Float[Array | np.ndarray, "M G"]
    dropout: Float[Array | np.ndarray, "M G"]
    rank: Int[Array | np.ndarray, "M G"]
    trained_rank: Int[Array | np.ndarray, "M G"] | None = None
    vera: VeraTables | None = None
    token_ids: dict[str, Int[Array | np.ndarray, "1 G E"]] = dataclasses.field(
        default_factory=dict
    )
    trains_whole: dict[str, Bool[Array | np.ndarray, "1 G"]] = dataclasses.field(
        default_factory=dict
    )

    def by_path(self, adapted: Sequence[str]) -> dict[str, Any]:
        """Returns the variable of each setting of each adapted linear.

        Args:
            adapted: Paths of the linears.
        """
        found = {
            f"{path}.{field.name}": values[i]
            for i, path in enumerate(adapted)
            for field in dataclasses.fields(self)
            if field.name not in ("vera", "token_ids", "trains_whole")
            and (values := getattr(self, field.name)) is not None
        }
        for module, ids in self.token_ids.items():
            found[f"{ROW_MODULES[module]}.ids"] = ids[0]
        for module, is_trained in self.trains_whole.items():
            found[f"{WHOLE_MODULES[module]}.is_trained"] = is_trained[0]
        if (vera := self.vera) is not None:
            # Slices of them would be kept for the backward pass.
            shared = {"vera_a": vera.a, "vera_b": vera.b, "has_vera": vera.is_used}
            for name, tables in shared.items():
                found |= {f"{path}.{name}": tables[0] for path in adapted}
        return found
