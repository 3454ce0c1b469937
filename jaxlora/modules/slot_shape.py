"""The shape of the slots of a run, which is compiled into its programs."""

import dataclasses

from jaxlora.modules.variants.table import variants
from jaxlora.modules.variants.variant import TrainedTensor, Variant


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotShape:
    """The slot tables of a layer.

    Attributes:
        num_slots: G, number of adapters that the tables hold.
        rank: R, largest rank of a slot; smaller ones are zero-padded.
        use_dropout: Whether training can drop features. It is compiled into the
            programs; the rate of each slot is data.
        settings: The settings of the variants for which there are tables beside LoRA.
        dora_dropout: Whether a slot can have both DoRA and dropout, which takes a
            second product with W. It is compiled into the programs.
        keeps_start: Whether a slot can hold an adapter of which half of the ranks is
            fixed; see `jaxlora.adapters.initial`. It is compiled into the programs.
        optimizers: Names of the optimizers of jobs, sorted, for whose state there are
            tables; see `jaxlora.adapters.optimizers.table`.
        has_score: Whether slots have a score head; see `jaxlora.models.score`.
        num_token_rows: Largest number of rows of the embedding that a slot trains.
        num_head_rows: Largest number of rows of an untied head that a slot trains.
        whole_modules: Modules (`embed_tokens`, `lm_head`) of which slots train whole
            copies; see `jaxlora.models.whole_tables`.
        has_lora: Whether there are tables for A and B, beside those of VeRA. They are
            as large in slots with VeRA, which do not need them.
        has_references: Whether there are further tables of weights, for adapters with
            which objectives compare; see `jaxlora.adapters.reference_table`.

    Raises:
        ValueError: A size is not positive.
    """

    num_slots: int
    rank: int
    use_dropout: bool = True
    settings: tuple[str, ...] = ()
    dora_dropout: bool = False
    keeps_start: bool = False
    optimizers: tuple[str, ...] = ("adamw",)
    has_score: bool = False
    num_token_rows: int = 0
    num_head_rows: int = 0
    whole_modules: tuple[str, ...] = ()
    has_lora: bool = True
    has_references: bool = False

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
