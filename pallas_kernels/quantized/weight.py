"""The parts that the formats of quantized base weights have in common."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class QuantizedWeight(abc.ABC):
    """A frozen base weight W [N, K] in a quantized format.

    A format is a frozen dataclass of arrays, registered as a pytree. Weights are held
    as Hugging Face stores them: one row of K values for each of N output features.

    Attributes:
        format: Name of the format in `FORMATS`.
        reaches_kernels: Whether back ends get such a weight as it is. If not, they get
            a dequantized copy [N, K].
        dimensions: Dimensions N and K of each array, by field name. Blocks along a
            dimension have its letter; an array of neither has none.
        smallest_scale: Least scale of an output feature that kernels can divide by.
    """

    format: ClassVar[str]
    reaches_kernels: ClassVar[bool] = False
    dimensions: ClassVar[Mapping[str, tuple[Literal["N", "K"], ...]]]
    smallest_scale: ClassVar[float] = 0.0

    @classmethod
    @abc.abstractmethod
    def quantize(cls, w: jax.Array) -> "QuantizedWeight":
        """Quantizes a weight [N, K] of any float dtype; can run under `jax.jit`."""

    @abc.abstractmethod
    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        """Returns W [N, K], computed in float32 and rounded once to `dtype`."""

    @classmethod
    @abc.abstractmethod
    def shapes(
        cls, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array of a weight, by field name.

        Args:
            out_features: N.
            in_features: K.

        Raises:
            ValueError: The format cannot hold such a weight.
        """

    @property
    @abc.abstractmethod
    def in_features(self) -> int:
        """K."""

    @property
    @abc.abstractmethod
    def out_features(self) -> int:
        """N."""

    @abc.abstractmethod
    def _own_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns `shapes` of this weight, with the optional arrays that it has."""

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N), the shape of the unquantized weight in `Projection`."""
        return self.in_features, self.out_features

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of experts: each array has a first axis of X."""
        name, dimensions = next(iter(self.dimensions.items()))
        return jnp.ndim(self.arrays[name]) > len(dimensions)

    def first(self) -> "QuantizedWeight":
        """Returns the first weight of a stack."""
        return jax.tree.map(lambda x: x[0], self)

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays by field name, without those that are None."""
        names = [f.name for f in dataclasses.fields(self)]  # pyrefly: ignore
        fields = {name: getattr(self, name) for name in names}
        return {k: v for k, v in fields.items() if hasattr(v, "dtype")}

    @property
    def constants(self) -> dict[str, Any]:
        """The fields that are part of the compiled program, by name."""
        fields = dataclasses.fields(self)  # pyrefly: ignore
        static = [f.name for f in fields if f.metadata.get("static")]
        return {name: getattr(self, name) for name in static}

    @property
    def reaches_backward_kernels(self) -> bool:
        """Whether the same holds for the backward pass as `reaches_kernels` says."""
        return self.reaches_kernels

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together; works with `jax.ShapeDtypeStruct` too."""
        return sum(
            math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
            for x in self.arrays.values()
        )

    def check(self) -> None:
        """Checks that the arrays belong together.

        Raises:
            ValueError: An array is missing, or has another shape or dtype.
        """
        wanted = {k: (v.shape, v.dtype.name) for k, v in self._own_shapes().items()}
        got = {
            k: (jnp.shape(v), jnp.dtype(v.dtype).name) for k, v in self.arrays.items()
        }
        if got != wanted:
            name = type(self).__name__
            raise ValueError(
                f"the arrays of {name} do not match: got {got}, wanted {wanted} for "
                f"N={self.out_features} and K={self.in_features}. Make the weight with "
                f"{name}.quantize, or allocate it by {name}.shapes."
            )


def setting(default: Any, *, values: tuple[Any, ...], is_fixed: bool = False) -> Any:
    """Makes a field of `WeightOptions` that users may set.

    Args:
        default: Its default.
        values: All values that it can have.
        is_fixed: Whether it cannot be changed once a weight is quantized.
    """
    metadata = {"values": values, "is_fixed": is_fixed}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Options of a format: what its weights store, and how they are multiplied.

    A format with options extends this class, with a field for each; `OPTIONS` has the
    class of each format. Fields that are made by `setting` are the settings that a run
    has in `quantize_base_args`.
    """

    weight: ClassVar[type[QuantizedWeight]]

    @property
    def multiplies_forward(self) -> bool:
        """Whether weights are multiplied as they are, and not only dequantized."""
        return False

    @property
    def multiplies_backward(self) -> bool:
        """Whether the same holds for the gradient of the input."""
        return False

    @property
    def stores_transpose(self) -> bool:
        """Whether each weight has a second, transposed copy."""
        return False

    def storage_choices(self) -> tuple["WeightOptions", ...]:
        """Returns the options that remain if one is chosen by the device's memory.

        They are ordered from the least memory to the fastest, and have the same
        results. Usually there is no choice, and they are these options alone.
        """
        return (self,)

    def of_experts(self) -> "WeightOptions":
        """Returns the options of experts' weights, which are always dequantized."""
        return self

    def with_settings(self, settings: Mapping[str, Any]) -> "WeightOptions":
        """Returns these options with those that a user has set.

        Args:
            settings: Values by name.

        Raises:
            ValueError: The format has no such setting, or the setting no such value, or
                two of them contradict each other.
        """
        fields = {f.name: f for f in dataclasses.fields(self) if "values" in f.metadata}
        for name, value in settings.items():
            if name not in fields:
                has = f"has {', '.join(fields)}" if fields else "has none"
                raise ValueError(
                    f"{name!r} is no setting of {self.weight.format}, which {has}"
                )
            values = fields[name].metadata["values"]
            if not any(v == value and type(v) is type(value) for v in values):
                wanted = ", ".join(str(v).lower() for v in values)
                raise ValueError(f"{name}={value!r} must be one of {wanted}")
        return dataclasses.replace(self, **settings)

    def of_same_weights(self, settings: Mapping[str, Any]) -> "WeightOptions":
        """Returns `with_settings`, for weights that are quantized with these options.

        Raises:
            ValueError: As there, or a setting would need other weights.
        """
        changed = self.with_settings(settings)
        for field in dataclasses.fields(self):
            then, now = getattr(self, field.name), getattr(changed, field.name)
            if field.metadata.get("is_fixed") and then != now:
                raise ValueError(
                    f"{field.name} is {now!r}, and the weights are quantized with "
                    f"{then!r}"
                )
        return changed

    def shapes(
        self, out_features: int, in_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array of a weight [N, K], by field.

        Raises:
            ValueError: The format cannot hold such a weight.
        """
        return self.weight.shapes(out_features, in_features)

    def quantize(self, w: jax.Array) -> QuantizedWeight:
        """Quantizes a weight [N, K] of any float dtype; can run under `jax.jit`."""
        return self.weight.quantize(w)

    def make(self, arrays: Mapping[str, Any]) -> QuantizedWeight:
        """Returns the weight of these arrays, by field."""
        return self.weight(**arrays)

    def complete(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the arrays of a weight with those that follow from the others.

        Arrays that follow from the others, and that these options do not store, are
        left out.
        """
        return dict(arrays)

    def result_settings(self) -> dict[str, Any]:
        """Returns the options that change the results of products, by name."""
        return {}
