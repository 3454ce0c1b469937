"""The rows that a program trains or evaluates at once."""

import dataclasses
import typing

import jax
from jaxtyping import Array, Float, Int


@typing.no_type_check  # JAX also instantiates it with objects that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Token rows of several jobs. The rows of a job fill a whole number of blocks.

    Attributes:
        token_ids: Token ids; 0 in padding rows.
        positions: Position of each token in its sample.
        segment_ids: Index of the sample that each row belongs to; -1 in padding rows.
        labels: The token that each row should predict: the next one of its sample, or
            one that came with the sample.
        loss_inputs: What each objective of the run reads of its rows, by name of the
            objective; 0 in other rows.
        group_ids: Index of the group of samples that each row belongs to; -1 in padding
            rows. None: every group of the run is one sample.
        token_index: Index of each token in the global batch of its job.
        block_adapter: Slot of each token block; -1 for padding blocks.
        reference_nll: Negative log likelihood of each row's label by the reference of
            its job, in nats; 0 if no sample needs it. None: no objective of the run
            has a reference.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    segment_ids: Int[Array, " T"]
    labels: Int[Array, " T"]
    loss_inputs: dict[str, dict[str, Float[Array, "T ..."]]]
    group_ids: Int[Array, " T"] | None = None
    token_index: Int[Array, " T"]
    block_adapter: Int[Array, " NB"]
    reference_nll: Float[Array, " T"] | None = None
