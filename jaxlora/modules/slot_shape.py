"""The shape of the slots of a run, which is compiled into its programs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxlora.modules.variants.table import variants
from jaxlora.modules.variants.variant import TrainedTensor, Variant


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotShape:
    """The slot tables of a layer.

    Attributes:
        num_slots: G, number of adapters that the tables hold.
        rank: R, largest rank of a slot; smaller ones are zero-padded.
        expert_rank: The same in the linears of experts, whose ranks are mostly smaller;
            0: it is R.
        use_dropout: Whether training can drop features. It is compiled into the
            programs; the rate of each slot is data.
        settings: The settings of the variants for which there are tables beside LoRA.
        dora_dropout: Whether a slot can have both DoRA and dropout, which takes a
            second product with W. It is compiled into the programs.
        keeps_start: Whether a slot can hold an adapter of which half of the ranks is
            fixed; see `jaxlora.adapters.initial`. It is compiled into the programs.
        optimizers: Names of the optimizers of jobs, sorted, for whose state there are
            tables; see `jaxlora.adapters.optimizers.table`.
        outside: The modules outside the linears that slots train, by their names in
            `jaxlora.models.slot_modules`, each with the largest number of its rows
            that a slot trains (1 if they are not counted); sorted.
        has_lora: Whether there are tables for A and B, beside those of VeRA. They are
            as large in slots with VeRA, which do not need them.
        has_references: Whether there are further tables of weights, for adapters with
            which objectives compare; see `jaxlora.adapters.reference_table`.

    Raises:
        ValueError: A size is not positive.
    """

    num_slots: int
    rank: int
    expert_rank: int = 0
    use_dropout: bool = True
    settings: tuple[str, ...] = ()
    dora_dropout: bool = False
    keeps_start: bool = False
    optimizers: tuple[str, ...] = ("adamw",)
    outside: tuple[tuple[str, int], ...] = ()
    has_lora: bool = True
    has_references: bool = False

    def num_rows(self, name: str) -> int:
        """Returns the rows of a module in `outside`; 0 if no slot trains it."""
        return dict(self.outside).get(name, 0)

    def rank_of(self, *, is_of_experts: bool) -> int:
        """Returns the largest rank of a slot in a linear."""
        return (self.expert_rank or self.rank) if is_of_experts else self.rank

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants for which there are tables."""

        def is_here(setting: str | None) -> bool:
            return self.has_lora if setting is None else setting in self.settings

        return tuple(v for v in variants() if is_here(v.setting))

    @property
    def tensors(self) -> tuple[TrainedTensor, ...]:
        """The trained tensors for which there are tables."""
        return tuple(tensor for variant in self.variants for tensor in variant.tensors)

    def __post_init__(self):
        if self.num_slots < 1 or self.rank < 1:
            raise ValueError(
                f"num_slots and rank must be positive, got {self.num_slots} and "
                f"{self.rank}."
            )


def largest_rows(
    many: Iterable[Mapping[str, Sequence[int]]],
) -> tuple[tuple[str, int], ...]:
    """Returns `SlotShape.outside` of slots that can hold each of some adapters.

    Args:
        many: What an adapter trains outside the linears, as `Adapter.tokens`.
    """
    rows = {(name, len(ids) or 1) for tokens in many for name, ids in tokens.items()}
    return tuple(dict(sorted(rows)).items())  # of equal names, the largest stays
