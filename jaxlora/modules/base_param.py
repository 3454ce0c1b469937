"""The kind of Flax variables that holds frozen weights."""

from flax import nnx


class BaseParam(nnx.Param):
    """A frozen weight of the base model."""
