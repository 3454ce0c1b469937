"""A variant of LoRA as one object: what it trains, computes, starts from and saves.

Each file of this folder has one, as `VARIANT`. Slots, optimizers, checkpoints, memory,
PEFT folders and `MultiLoraLinear` loop over the variants of a run and name none.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxlora.config import LoraJob
from jaxlora.pallas_kernels import DoraGain

# Letters of docs/conventions.md: input features, output features and rank.
Dimension = Literal["K", "N", "R"]


@runtime_checkable
class RateSettings(Protocol):
    """The settings of a job, or of one step, that rates of tensors follow from."""

    @property
    def lora_plus_ratio(self) -> float:
        """The ratio of LoRA+."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class NewModule:
    """A module for which a job draws its first tensors.

    Attributes:
        rng: Random numbers of the module alone.
        kernel: Its frozen weight, K N.
        rank: The adapter's rank.
    """

    rng: np.random.Generator
    kernel: Any
    rank: int


# Makes a tensor's initial values for a job, one for each module in the same order.
Start = Callable[[LoraJob, Sequence[NewModule]], list[np.ndarray]]

# A and B of the slots.
Pair = tuple[Float[Array, "G K R"], Float[Array, "G R N"]]
# The trained tensors of an adapter in one linear, by name.
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTensor:
    """One of the tensors that an adapter trains in each linear, in float32.

    Attributes:
        name: Its name in paths, and the name of its variable in `MultiLoraLinear`.
        peft_name: Its name in a PEFT folder, after the name of the linear. PEFT stores
            the transpose of our array.
        dimensions: Its dimensions; a slot pads those of rank with zeros.
        start: Makes its initial values at the adapter's own rank; None: `from_weight`
            does.
        from_weight: Makes its initial value from the frozen weight alone, K N or a
            quantized weight, in the dtype of the products. It runs programs on the
            weight's devices.
        rate_ratio: Its learning rate in a step, divided by that of A; None: always 1.
    """

    name: str
    peft_name: str
    dimensions: tuple[Dimension, ...]
    start: Start | None
    from_weight: Callable[[Any, DTypeLike], np.ndarray] | None = None
    rate_ratio: Callable[[RateSettings], float] | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether rows are multiplied by it, in their dtype."""
        return len(self.dimensions) == 2

    def shape(self, in_features: int, out_features: int, rank: int) -> tuple[int, ...]:
        """Shape of the tensor in a linear with a weight K N, at a rank R."""
        sizes = {"K": in_features, "N": out_features, "R": rank}
        return tuple(sizes[letter] for letter in self.dimensions)


def lora_plus(settings: RateSettings) -> float:
    """The ratio of LoRA+ (2402.12354); PEFT gives it to B and to all vectors."""
    return settings.lora_plus_ratio


class Variant:
    """One of the ways in which adapters change a linear.

    The kernels compute `x W + scaling * dropout(x) A B`. A variant makes A and B of
    what it trains (`matrices`), or scales the output after that (`gain`). It takes no
    part in what it does not override. A `linear` is a `MultiLoraLinear` with slots.

    Attributes:
        setting: The setting of `LoraJob` and of PEFT's adapter_config.json, true or
            false, that gives it to an adapter; None: all have it.
        tensors: What it trains in each linear. Initial values are drawn in this order.
        replaces_lora: Whether it takes the place of the trained A and B. Its adapters
            have one rank, which is not bounded by the weight's, and no scaling.
        makes_matrices: Whether `matrices` makes new ones, which are then made again for
            the gradient instead of being kept, and `as_lora` knows them.
        load_keywords: Keywords that `MultiLoraLinear.load_slot` takes for it.
        peft_type: PEFT's name of the kind of adapter.
        peft_keys: Settings in adapter_config.json that only it has.
        peft_tensors: Names of tensors in PEFT's files that are in no linear.
    """

    setting: ClassVar[str | None] = None
    tensors: ClassVar[tuple[TrainedTensor, ...]] = ()
    replaces_lora: ClassVar[bool] = False
    makes_matrices: ClassVar[bool] = False
    load_keywords: ClassVar[frozenset[str]] = frozenset()
    peft_type: ClassVar[str] = "LORA"
    peft_keys: ClassVar[frozenset[str]] = frozenset()
    peft_tensors: ClassVar[tuple[str, ...]] = ()

    # ---- in a run --------------------------------------------------------------------

    def settings(
        self, slots: Any, in_features: int, out_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Settings of a slot in a linear that it reads, by name: shapes and dtypes.

        Args:
            slots: The `SlotShape`.
            in_features: K.
            out_features: N.
        """
        return {}

    def slot_settings(self, slots: Any, rank: int, **given: Any) -> dict[str, Any]:
        """Values of its settings for an adapter that is loaded by hand, by name.

        Args:
            slots: The `SlotShape`.
            rank: The adapter's rank.
            **given: Those of `load_keywords` that it was given.
        """
        return {}

    def matrices(self, linear: Any, made: Pair | None) -> Pair | None:
        """A and B of all slots; those of slots without the variant stay as they are.

        Args:
            linear: The linear, whose `table` has what slots train and read.
            made: What the variants before it made; None: there are none.
        """
        return made

    def gain(
        self, linear: Any, x: Float[Array, "T K"], *, drops: bool
    ) -> DoraGain | None:
        """Gains of the output features, which are applied after the kernels.

        Args:
            linear: The linear.
            x: Token rows.
            drops: Whether features are dropped.
        """
        return None

    def constants(self, linear: Any, dtype: DTypeLike) -> dict[str, Array]:
        """Returns values that stay while weights and slots stay, by name.

        Args:
            linear: The linear.
            dtype: Dtype of the rows that will come.
        """
        return {}

    def call_bytes(self, slots: Any, in_features: int, out_features: int) -> int:
        """Scratch memory of a linear, beside that of others that share its input."""
        return 0

    def linear_bytes(
        self, slots: Any, in_features: int, out_features: int, copied: int
    ) -> int:
        """Scratch memory of a linear that has ended before the next one begins.

        Args:
            slots: The `SlotShape`.
            in_features: K.
            out_features: N.
            copied: Bytes for each weight that is made dense; 0: it is.
        """
        return 0

    # ---- of an adapter ---------------------------------------------------------------

    def as_lora(
        self, tensors: Tensors, frozen: Any, in_features: int, out_features: int
    ) -> Tensors:
        """Tensors of an adapter without the variant, with the same product A B.

        Args:
            tensors: The adapter's tensors in a linear.
            frozen: What all its linears share, see `frozen`; None: nothing.
            in_features: K.
            out_features: N.
        """
        return tensors

    def merged(
        self, w: Float[np.ndarray, "N K"], tensors: Tensors
    ) -> Float[np.ndarray, "N K"]:
        """The weight that an adapter has instead of W + scaling A B, which is given."""
        return w

    def frozen(self, job: LoraJob, shapes: Sequence[Sequence[int]]) -> Any:
        """Returns the values that all linears of a new adapter share; None: none.

        Args:
            job: The adapter's job.
            shapes: (K, N) of each linear.
        """
        return None

    # ---- in a PEFT folder ------------------------------------------------------------

    def to_peft(self, adapter: Any) -> dict[str, Any]:
        """Settings of an `Adapter` that stand in the place of LoRA's."""
        return {}

    def from_peft(self, path: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
        """Settings of a folder under the names that LoRA has for them.

        Raises:
            AdapterError: One of them cannot be used.
        """
        return config

    def frozen_to_peft(self, frozen: Any) -> Tensors:
        """Tensors to be saved for what all linears share, as PEFT names them."""
        return {}

    def frozen_from_peft(
        self,
        folder: pathlib.Path,
        config: Mapping[str, Any],
        saved: Mapping[str, np.ndarray],
        shapes: Sequence[Sequence[int]],
    ) -> Any:
        """Reads what all linears of a saved adapter share; None: nothing.

        Args:
            folder: The folder, for errors.
            config: Its settings, as `from_peft` returns them.
            saved: Those of `peft_tensors` that it holds.
            shapes: (K, N) of each linear.

        Raises:
            AdapterError: The tensors do not fit.
        """
        return None
