"""The kinds of Flax variables that are not trained."""

from flax import nnx


class BaseParam(nnx.Param):
    """A frozen weight of the base model."""


class SlotVariable(nnx.Variable):
    """A setting of each slot: data to the compiled step, never trained."""
